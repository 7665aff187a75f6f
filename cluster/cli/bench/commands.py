"""`diffray bench`: how fast it is, offline and behind a server."""

from diffray.cluster.cli.bench.offline import latency, throughput
from diffray.cluster.cli.bench.online import ManyValues, serve
from diffray.cluster.cli.help import Command, command_line, examples

app = command_line("Measure latency, throughput, or a server.")
app.command(cls=Command, epilog=examples("diffray bench latency --batch-size 1,8"))(latency)
app.command(
    cls=Command,
    epilog=examples("diffray bench throughput --dataset-name demo --report throughput.html"),
)(throughput)
app.command(
    cls=ManyValues,
    epilog=examples("diffray bench serve --dataset-name demo --max-concurrency 1,8"),
)(serve)
