"""`python -m diffray` is the command `diffray`."""

from diffray.cluster.cli.main import app

app(prog_name="diffray")
