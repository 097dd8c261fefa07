"""Programs for people, which are no roles: `apexrl --help` lists them."""
