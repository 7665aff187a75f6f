"""`diffray bench`: how fast it is, offline and behind a server."""

import typer

from diffray.cluster.bench.offline_commands import latency, throughput
from diffray.cluster.bench.serve_command import ManyValues, serve

app = typer.Typer(no_args_is_help=True, help="Measure latency, throughput, and a server.")
app.command()(latency)
app.command()(throughput)
app.command(cls=ManyValues)(serve)
