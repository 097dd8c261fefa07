"""hashicorp/aws as far as it can be had without its binary: its real schema, over Terraform's plugin protocol 6.

`python -m tests.deploy.offline_provider terraform -chdir=deploy/terraform/cluster validate` runs a command with it.
Terraform itself and the configuration are the real ones. The provider knows every argument, block and type of the real
one (`schema.py`), the offers of EC2 in each place (`data_sources.py`), and the values that AWS takes (`aws_values.py`).
Its resources exist in the state only. It cannot tell the answers of AWS.
"""
