"""The security groups: nothing comes in but from the cluster and for operators, out go its own flows and HTTPS.

That the flows are those that the roles need, test_terraform_shards.py checks by their ports, and test_cluster.py with
roles and operators behind these groups.
"""

import re

from tests.deploy.terraform import ROLES, resources, rules_of, templates

EC2_TEXT = re.compile(r"[\w. \-:/()#,@\[\]+=&;{}!$*]{0,255}", re.A)  # no apostrophes: EC2 refuses them


def test_nothing_comes_in_but_from_the_cluster_and_out_go_only_its_flows_and_https(applied):
    for rule in rules_of(applied, "ingress"):
        assert rule["peer"] and not rule["cidr_ipv4"] and not rule["cidr_ipv6"] and not rule["prefix_list_id"], rule
    for rule in rules_of(applied, "egress"):
        if rule["peer"] is None:
            assert (rule["ip_protocol"], rule["from_port"], rule["to_port"]) == ("tcp", 443, 443), rule
    for address, values in resources(applied).items():
        if address.startswith(("aws_security_group.", "aws_default_security_group.")):
            assert not values["ingress"] and not values["egress"], address
        if address.startswith(("aws_security_group.", "aws_vpc_security_group_")):
            assert EC2_TEXT.fullmatch(values["description"]), address


def test_hosts_are_in_the_group_of_their_role(applied):
    found = resources(applied)
    groups = {role: found[f'aws_security_group.role["{role}"]']["id"] for role in ROLES}
    assert found["aws_instance.replay"]["vpc_security_group_ids"] == [groups["replay"]]
    for role, template in templates(applied).items():
        [interface] = template["network_interfaces"]
        assert interface["security_groups"] == [groups[role]]
