"""A small evaluator of IAM policies: it tells which requests they allow.

It knows the elements that our policies use and fails on anything else. It takes identity policies of one account, as
for a host's role: a request is allowed when a statement allows it and none denies it.
"""

import fnmatch
import json
import re
from collections.abc import Iterable
from typing import Any

Statement = dict[str, Any]

KNOWN = {"Sid", "Effect", "Action", "Resource", "Condition"}
OPERATORS = {
    "StringEquals": lambda value, wanted: value == wanted,
    "StringLike": lambda value, wanted: matches(value, wanted, any_case=False),
}


def statements(document: str) -> list[Statement]:
    """Returns the statements of a policy in JSON."""
    found = json.loads(document)["Statement"]
    found = found if isinstance(found, list) else [found]
    for statement in found:
        assert statement.keys() <= KNOWN, f"the evaluator does not know {statement.keys() - KNOWN}"
    return found


def allows(given: Iterable[Statement], action: str, resource: str, **context: str) -> Statement | None:
    """Returns the statement that allows a request, None when it is denied.

    Args:
      context: keys of conditions, with `__` for the colon: s3__prefix="a/".
    """
    facts = {name.replace("__", ":").replace("_SLASH_", "/"): value for name, value in context.items()}
    fitting = [statement for statement in given if _fits(statement, action, resource, facts)]
    if any(statement["Effect"] == "Deny" for statement in fitting):
        return None
    return next((statement for statement in fitting if statement["Effect"] == "Allow"), None)


def matches(value: str, pattern: str, any_case: bool) -> bool:
    """Returns whether a value fits a pattern with * and ?; the * of IAM also stands for colons and slashes."""
    expression = fnmatch.translate(pattern.replace("[", "[[]"))
    return re.match(expression, value, re.I if any_case else 0) is not None


def as_list(value: Any) -> list[Any]:
    """Returns one or several as a list, as policies allow both."""
    return value if isinstance(value, list) else [value]


def _fits(statement: Statement, action: str, resource: str, facts: dict[str, str]) -> bool:
    return (
        any(matches(action, pattern, any_case=True) for pattern in as_list(statement["Action"]))
        and any(matches(resource, pattern, any_case=False) for pattern in as_list(statement["Resource"]))
        and all(
            key in facts and any(OPERATORS[operator](facts[key], wanted) for wanted in as_list(values))
            for operator, conditions in statement.get("Condition", {}).items()
            for key, values in conditions.items()
        )
    )
