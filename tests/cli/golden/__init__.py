"""Golden pages: what every command says of itself, and what it says when it is called wrongly.

Each command has one page beside this file. A page holds the command's `--help` and a list of wrong
calls, each with its exit status and what it printed. `python -m tests.cli.golden --write` makes all
pages anew.
"""
