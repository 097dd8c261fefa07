"""Programs for people, which are no roles: `python -m apexrl.tools.NAME --help`."""
