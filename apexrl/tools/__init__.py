"""Programs for people, beside the roles: `python -m apexrl.tools.NAME --help`."""
