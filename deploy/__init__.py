"""A cluster on EC2: the commands of `python -m deploy` are functions of these modules (deploy/README.md)."""
