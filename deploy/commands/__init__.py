"""The commands of `python -m deploy`. Each runs the bare commands of deploy/README.md, and prints them."""
