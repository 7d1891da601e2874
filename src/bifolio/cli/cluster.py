"""`bifolio cluster`: two pools on the machines of a Ray cluster, and what can be done to them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from bifolio.cli.output_paths import plain
from bifolio.errors import BifolioError, ConfigError

app = typer.Typer(
    name="cluster",
    help="""Two pools on the machines of a Ray cluster.

    [bold]Examples[/]

      bifolio cluster up cluster.toml
      bifolio cluster status --url http://127.0.0.1:8000
      bifolio cluster add decode
      bifolio cluster replace p1
    """,
    no_args_is_help=True,
)

_CHANGE_SECONDS = 900.0
"""A worker may have requests to finish, or a large model to load."""

Url = Annotated[
    str, typer.Option(help="Where the router listens.", metavar="URL", show_default=True)
]
Key = Annotated[
    str,
    typer.Option(
        "--admin-key",
        envvar="BIFOLIO_ADMIN_KEY",
        help="The administrator's key, as `cluster up` or `serve` got it; the variable is safer.",
        metavar="KEY",
        show_default=False,
    ),
]
Name = Annotated[str, typer.Argument(help="A worker, as `status` names it: p0, d1, …")]
HERE = "http://127.0.0.1:8000"


@app.command()
def up(
    file: Annotated[
        Path,
        typer.Argument(help="TOML file, see docs/cluster.md.", metavar="FILE", callback=plain),
    ],
    host: Annotated[
        str | None, typer.Option(help="Address to listen on.", show_default="the file's")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on.", show_default="the file's")
    ] = None,
    key: Key = "",
) -> None:
    """Place the workers of both pools, and serve until Ctrl-C.

    The router and the API run here; the workers run where Ray has room for them. All machines need
    bifolio, the model under the same path or name, and a way to each other by TCP.
    """
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ConfigError("`bifolio cluster` needs Ray: pip install 'bifolio[ray]'") from error
    from bifolio.cli.launch import launch
    from bifolio.cluster.cluster_config import read_cluster
    from bifolio.cluster.deploy import connect, router_over

    server, cluster = read_cluster(file, {"host": host, "port": port, "admin_key": key or None})
    connect(cluster)
    launch(server, client=lambda config, on_loading: router_over(config, cluster, on_loading))


@app.command()
def status(url: Url = HERE, key: Key = "") -> None:
    """Show the workers of both pools."""
    from rich.console import Console

    from bifolio.cli.tables import TerminalTable
    from bifolio.lab.report.sections import Table

    workers = _ask("GET", f"{url}/admin/workers", key)["workers"]
    headers = ("worker", "state", "host", "peers", "run + wait", "used", "free")
    rows = []
    for worker in workers:
        state = "draining" if worker["draining"] else "up" if worker["up"] else "down"
        state += f", restarted {worker['restarts']}×" if worker["restarts"] else ""
        requests = f"{worker['running']} + {worker['waiting']}"
        cells = [worker["name"], state, worker["host"], worker["peers"], requests]
        cells += [worker["pages_live"], worker["pages_free"]]
        rows.append(["–" if cell is None else str(cell) for cell in cells])
    for pool in ("prefill", "decode"):
        plans = {w["plan"] for w in workers if w["pool"] == pool and w["plan"] is not None}
        print(f"{pool} ({pool[0]}…): {', '.join(sorted(plans)) or 'no worker is up'}")
    Console().print(TerminalTable(Table(headers, rows, names=3)))


@app.command()
def add(
    pool: Annotated[str, typer.Argument(help="prefill or decode")],
    url: Url = HERE,
    key: Key = "",
) -> None:
    """Start another worker of a pool, and wait until it is loaded."""
    name = _ask("POST", f"{url}/admin/workers", key, pool=pool)["name"]
    print(f"{name} serves")


@app.command()
def remove(name: Name, url: Url = HERE, key: Key = "") -> None:
    """Let a worker finish what it has, and end it."""
    _ask("DELETE", _path(url, name), key)
    print(f"{name} is gone")


@app.command()
def replace(name: Name, url: Url = HERE, key: Key = "") -> None:
    """Let a worker finish what it has, and start another in its place."""
    _ask("POST", f"{_path(url, name)}/replace", key)
    print(f"{name} is replaced")


def _path(url: str, name: str) -> str:
    """Of a worker; nothing else may be meant by a name that holds dots, slashes or a query."""
    if not re.fullmatch(r"[pd]\d+", name, re.ASCII):
        raise ConfigError(f"{name!r} is no worker's name; `bifolio cluster status` shows them")
    return f"{url}/admin/workers/{name}"


def _ask(method: str, url: str, key: str, **query: str) -> Any:
    import httpx

    if not key:
        raise ConfigError("no administrator's key: set BIFOLIO_ADMIN_KEY as for the server")
    from bifolio.lab.bench.load_client import address_of, bearer

    address_of(url)
    headers = {b"Authorization": bearer(key)}
    try:
        answer = httpx.request(method, url, headers=headers, params=query, timeout=_CHANGE_SECONDS)
    except httpx.HTTPError as error:
        raise ConfigError(f"{url}: {error}; is the server there? (--url)") from error
    if answer.status_code == 200:
        return answer.json()
    if answer.status_code == 404 and "admin" in answer.text:
        raise ConfigError(f"{url}: the server has no administrator's key, or no pools of workers")
    try:
        text = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = answer.text[:200]
    raise BifolioError(f"{url}: {answer.status_code}: {text}")
