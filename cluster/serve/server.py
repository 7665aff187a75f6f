"""`diffray serve`: applications on a new or a running Ray cluster, until Ctrl-C."""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, LoggingConfig

from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.control.actors import first_line
from diffray.cluster.serve.address import (
    EVERYWHERE,
    Server,
    check_free,
    joined,
    reachable_url,
)
from diffray.cluster.serve.app import application, ingress_application
from diffray.cluster.serve.config_file import Application, Applications, IngressApplication
from diffray.cluster.serve.ray_session import Shortages, pending_reasons, running_ray, serve_details
from diffray.cluster.serve.supervisor import Ending, interruptible
from diffray.components.checkpoints.demos import description, examples

log = logging.getLogger(__name__)

DEADLINE_S = 3600.0  # seconds for the models to load
_POLL_S = 0.25
_LOOK_S = 0.05  # between checks whether Serve has started
_END_S = 30.0  # seconds for Serve and Ray to end, beyond those for running requests
_LEAVE_S = 2.0  # seconds for Serve to be told that applications that never were ready are gone
_QUIET_LOG = LoggingConfig(log_level="WARNING", enable_access_log=False)


def run_server(
    applications: Applications,
    server: Server,
    ending: Ending,
    say: Callable[[str], None],
    checked: Callable[[], None],
) -> None:
    """Serve until interrupted, then let running requests finish; `checked` waits for the models."""
    grace_s = max(each.grace_s for each in applications.all)
    ending.limit_s = _END_S + grace_s
    with running_ray(applications, server, ending, checked) as ray_context:
        server, starting = start_serve(server)
        with interruptible(ending.stopped):
            serves = False
            try:
                with contextlib.suppress(Interrupted):
                    deploy(applications, ending.stopped, partial(_wait_for, starting, server))
                    say(where_ray_is(server, ray_context.dashboard_url))
                    say(f"Loading {', '.join(map(_named, applications.models))} ...")
                    wait_until_ready(applications, say, ending.stopped)
                    url = reachable_url(serve_details(), here()) or f"port {server.port}"
                    say(ready_lines(applications, server, url))
                    serves = True
                    ending.stopped.wait()
                    say(
                        f"Finishing running requests, for at most {grace_s:g} s; a second Ctrl-C "
                        "or SIGTERM ends them at once."
                    )
            finally:
                if serves or server.address is not None:  # else Ray ends, and all with it
                    remove(applications, None if serves else _LEAVE_S)


class Interrupted(Exception):
    """The user interrupted the startup."""


def start_serve(server: Server) -> tuple[Server, "Future[None]"]:
    """Start Serve if the cluster has none; return where it listens, once it takes applications.

    The future is done when its proxies have started, too.
    """
    if found := serve_details():
        done = Future[None]()
        done.set_result(None)
        listens = found["http_options"] or {}
        return joined(server, listens.get("host"), listens.get("port", 0)), done
    options = {"host": server.host, "port": server.port}
    start = partial(serve.start, http_options=options, logging_config=_QUIET_LOG)
    starting = ThreadPoolExecutor(1).submit(start)
    while not serve_details() and not starting.done():
        time.sleep(_LOOK_S)
    return server, starting


def _wait_for(starting: "Future[None]", server: Server, stopped: threading.Event) -> None:
    """Wait until Serve has started; raise ValueError if it cannot."""
    while not starting.done():
        if stopped.wait(_LOOK_S):
            raise Interrupted
    try:
        starting.result()
    except RayError as error:
        check_free(server)
        raise ValueError(f"Ray Serve could not be started: {first_line(error)}") from None


def here() -> str:
    return str(ray.get_runtime_context().get_node_id())


def deploy(
    applications: Applications,
    stopped: threading.Event,
    wait_for_serve: Callable[[threading.Event], None] = lambda stopped: None,
) -> None:
    """Start the applications, whose replicas start while Serve's proxies do."""
    check_paths(applications, serve_details()["applications"])
    targets = [_target(each, application(each.config)) for each in applications.models]
    if applications.ingress is not None:
        targets.append(
            _target(applications.ingress, ingress_application(applications.ingress.config))
        )
    try:
        serve.run_many(
            targets,
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
    except (RayError, RayServeException) as error:
        raise ValueError(f"Ray Serve refused the applications: {first_line(error)}") from None
    wait_for_serve(stopped)


def wait_until_ready(
    applications: Applications, say: Callable[[str], None], stopped: threading.Event
) -> None:
    """Wait until each application answers; raise ValueError if one fails."""
    begin = time.monotonic()
    shortages = Shortages(say)
    while waiting := not_ready(applications):
        if stopped.is_set():
            raise Interrupted
        if time.monotonic() - begin > DEADLINE_S:
            raise ValueError(f"{', '.join(waiting)}: not ready after {DEADLINE_S:g} s")
        shortages.see(pending_reasons(), time.monotonic())
        time.sleep(_POLL_S)


def _named(each: Application) -> str:
    name, source = each.config.model_id, each.config.model_source
    return name if name == source else f"{name} from {source}"


def _target(each: Application | IngressApplication, built: Any) -> serve.RunTarget:
    return serve.RunTarget(
        target=built, name=each.name, route_prefix=each.route_prefix, logging_config=_QUIET_LOG
    )


def check_paths(applications: Applications, others: Mapping[str, Any]) -> None:
    """Refuse a path that another application of this Serve has."""
    owners = {each["route_prefix"]: name for name, each in others.items()}
    for each in applications.all:
        owner = owners.get(each.route_prefix)
        if owner not in (None, each.name):
            raise ValueError(
                f"the path {each.route_prefix} is used by application {owner!r}; give {each.title} "
                "another route_prefix in a --config file"
            )


def remove(applications: Applications, patience: float | None = None) -> None:
    """Remove the applications, and wait until their running requests have finished.

    The wait lasts at most `patience` seconds. Serve keeps running: other applications may share it.
    """
    names = {each.name for each in applications.all} & serve.status().applications.keys()
    deleting = [threading.Thread(target=_delete, args=(name,), daemon=True) for name in names]
    for each in deleting:
        each.start()
    for each in deleting:
        each.join(patience)


def _delete(name: str) -> None:
    while True:
        try:
            serve.delete(name)
        except TimeoutError:  # after a minute, which requests may outlast
            continue
        except Exception as error:  # Ray may have ended meanwhile
            log.debug("application %s: %s", name, error)
        return


def not_ready(applications: Applications) -> list[str]:
    """Return the applications that are still starting; raise if one has failed."""
    states = serve.status().applications
    waiting = []
    for each in applications.all:
        state = states.get(each.name)
        if state is None or state.status == ApplicationStatus.DEPLOYING:
            message = "" if state is None else failure_of(state)
            if message:
                raise ValueError(f"{each.title}: {message}")
            waiting.append(each.name)
        elif state.status != ApplicationStatus.RUNNING:
            raise ValueError(f"{each.title}: {failure_of(state) or state.message}")
    return waiting


def failure_of(state: Any) -> str:
    """Return why a replica could not start: the original error's message."""
    for deployment in state.deployments.values():
        lines = [line.strip() for line in deployment.message.splitlines() if line.strip()]
        for line in reversed(lines):
            _, found, text = line.partition("EngineFailed: ")
            if found:
                return str(text)
    return ""


def ready_lines(applications: Applications, server: Server, url: str) -> str:
    """Return how to reach the models, with an example and prompts to try; `url` is Serve's."""
    models, ingress = applications.models, applications.ingress
    first, endpoint = models[0], ingress or models[0]
    content = examples(first.config.model_source)[0]
    question: dict[str, Any] = {"messages": [{"role": "user", "content": content}]}
    names, whom, lines, prompts = f"{first.title} is", first.title, list[str](), list[str]()
    if ingress is not None:
        question = {"model": first.title, **question}
        names, whom = f"All models ({', '.join(each.title for each in models)}) are", "each of them"
    for each in models:
        if ingress is not None:
            lines.append(f"{each.title} is ready at {url}{each.route_prefix.rstrip('/')}/v1")
        if said := description(each.config.model_source, each.title):
            lines.append(said)
            prompts = prompts or ["Prompts to try:", *examples(each.config.model_source)[:3]]
    lines += "\n  ".join(prompts).splitlines()
    url += endpoint.route_prefix.rstrip("/")
    settings = endpoint.config.api_settings()
    lines.insert(
        len(lines) if ingress else 0, f"{names} {_ready_at(url, server, settings, question)}"
    )
    return "\n".join([*lines, *_pages(url, settings, whom)])


def _pages(url: str, settings: ApiSettings, whom: str) -> list[str]:
    """Return lines that lead to the page, a chat in the terminal, and the API's description."""
    lines = [f"Chat with {whom} and watch it at {url}/"] if settings.page else []
    key = " --api-key KEY" if settings.api_keys else ""
    lines.append(f"Chat in another terminal: diffray chat --base-url {url}{key}")
    return lines + ([f"Its API is described at {url}/docs"] if settings.docs else [])


def _ready_at(url: str, server: Server, settings: ApiSettings, question: Any) -> str:
    everywhere = f" (listening on {server.host})" if server.host in EVERYWHERE else ""
    key = ' -H "Authorization: Bearer KEY"' if settings.api_keys else ""
    return (
        f"ready at {url}/v1{everywhere} ; try: curl {url}/v1/chat/completions{key} "
        f"-H 'Content-Type: application/json' -d '{json.dumps(question)}'"
    )


def where_ray_is(server: Server, dashboard: str) -> str:
    address = ray.get_runtime_context().gcs_address
    if dashboard:
        dashboard = f"; dashboard at http://{dashboard}"
    elif server.address is None:
        dashboard = " (its dashboard is off; --dashboard starts it)"
    return f"Ray is at {address}{dashboard}"
