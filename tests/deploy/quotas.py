"""Service Quotas and the account's plan as AWS answers them, which moto does not: the JSON protocol over HTTP."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from tests.deploy.commands import answering

NOT_FOUND = {"__type": "ResourceNotFoundException", "Message": "no plan"}
NO_QUOTA = {"__type": "NoSuchResourceException", "Message": "no such quota"}


@dataclasses.dataclass
class Account:
    """The quotas of an account by code, AWS's defaults for the others, and what it has asked for."""

    applied: dict[str, float]
    defaults: dict[str, float]
    plan: str = ""  # FREE, PAID, or empty for an account without a plan
    requested: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    endpoint: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """Returns the variables that send the requests here."""
        return {f"AWS_ENDPOINT_URL_{service}": self.endpoint for service in ("SERVICE_QUOTAS", "FREETIER")}

    def answer(self, operation: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request; one with `__type` is an error."""
        if operation == "GetAccountPlanState":
            return {"accountId": "123456789012", "accountPlanType": self.plan} if self.plan else NOT_FOUND
        code = body["QuotaCode"]
        if operation == "ListRequestedServiceQuotaChangeHistoryByQuota":
            return {"RequestedQuotas": [one for one in self.requested if one["QuotaCode"] == code]}
        if operation == "RequestServiceQuotaIncrease":
            self.requested.append({"QuotaCode": code, "DesiredValue": body["DesiredValue"], "Status": "PENDING"})
            return {"RequestedQuota": self.requested[-1]}
        values = {"GetServiceQuota": self.applied, "GetAWSDefaultServiceQuota": self.defaults}[operation]
        return {"Quota": {"QuotaCode": code, "Value": values[code]}} if code in values else NO_QUOTA


@contextlib.contextmanager
def serving(account: Account) -> Iterator[Account]:
    """Serves an account; its `environment` tells where."""

    def answer(_, __, headers, body: bytes) -> tuple[int, str]:
        found = account.answer(headers["X-Amz-Target"].partition(".")[2], json.loads(body))
        return 400 if "__type" in found else 200, json.dumps(found)

    with answering(answer) as account.endpoint:
        yield account
