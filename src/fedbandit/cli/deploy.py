"""`fedbandit deploy`: the server, a device's node, and what an operator sees and decides while it
runs.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedbandit.cli.help import Commands
from fedbandit.core.errors import ConfigError, refuse

if TYPE_CHECKING:
    from fedbandit.deploy.flower.processes import Security

app = Commands("Run training rounds on real devices with Flower.")
_Ca = Annotated[
    Path | None,
    typer.Option("--ca", help="Certificate of the authority that signed the server certificate."),
]
_State = Annotated[Path, typer.Argument(metavar="STATE", help="The server's state folder.")]


@app.command()
def server(
    toml: Annotated[
        Path, typer.Argument(metavar="TOML", help="The deployment; see docs/deployment.md.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    ca: _Ca = None,
    certificate: Annotated[Path | None, typer.Option(help="The server certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="The server's private key.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Use no TLS, on loopback or a trusted network.")
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            help="Serve /metrics and /healthz on this port of 127.0.0.1; 0 takes a free one."
        ),
    ] = None,
) -> None:
    """Run the rounds of a deployment, or resume them.

    Ctrl-C or SIGTERM ends it and everything that it started.
    """
    from fedbandit.deploy.flower.operate import serve
    from fedbandit.deploy.server.deployment import read_deployment

    read_deployment(toml)  # a wrong file is reported before missing certificates
    security = _security(insecure, ca=ca, certificate=certificate, key=key)
    serve(toml, host, port, security, _say, metrics_port)
    print("all rounds are done")


@app.command()
def client(
    agent: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The agent's folder on this device.")
    ],
    superlink: Annotated[
        str, typer.Option("--server", metavar="HOST:PORT", help="The address of the server.")
    ],
    ca: _Ca = None,
    key: Annotated[
        Path | None, typer.Option(help="This node's private key, in OpenSSH's format.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Use no TLS, on loopback or a trusted network.")
    ] = False,
    secure_aggregation: Annotated[
        bool, typer.Option("--secure-aggregation", help="Send updates by secure aggregation only.")
    ] = False,
    roster: Annotated[
        Path | None,
        typer.Option(help="Public keys of the nodes to hide among; the operator's roster.pub."),
    ] = None,
    unsigned_keys: Annotated[
        bool,
        typer.Option(
            "--unsigned-keys", help="Try secure aggregation without a roster: believe the server."
        ),
    ] = False,
    min_cohort: Annotated[
        int | None,
        typer.Option(min=3, help="Devices to hide among in a secure sum, this one included."),
    ] = None,
    create: Annotated[
        bool,
        typer.Option(
            "--create", help="Start before the app has made FOLDER: create it if it is missing."
        ),
    ] = False,
    user: Annotated[
        str | None,
        typer.Option(help="Whose device this is, if one person has several: an opaque name."),
    ] = None,
) -> None:
    """Let this device take part until Ctrl-C or SIGTERM.

    It trains on its agent's log whenever the server asks.
    """
    from fedbandit.deploy.flower.operate import take_part

    security = _security(insecure, ca=ca, node_key=key)
    take_part(
        agent,
        superlink,
        security,
        secure_aggregation,
        _say,
        create,
        roster,
        unsigned_keys,
        user,
        min_cohort,
    )


@app.command()
def register(
    state: _State,
    public_key: Annotated[Path, typer.Argument(metavar="KEY.pub", help="The node's public key.")],
    name: Annotated[str, typer.Option(help="A name for the node.")],
) -> None:
    """Allow a node to take part; the server must run with TLS."""
    from fedbandit.deploy.flower.operate import register_node

    register_node(state, public_key, name)
    print(f"{name} may take part and is on {state / 'roster.pub'}")


@app.command()
def status(
    state: _State, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show what the server waits for, reward, privacy and versions."""
    import json

    from fedbandit.deploy.server.status import full_status, status_lines

    found = full_status(state)
    print(json.dumps(found, indent=2) if as_json else "\n".join(status_lines(found)))


@app.command()
def nodes(state: _State) -> None:
    """List nodes, their devices and when they were last seen."""
    from fedbandit.deploy.server.status import nodes_table

    print("\n".join(nodes_table(state)))


@app.command()
def pause(state: _State) -> None:
    """Begin no new round until `resume`; a running one ends as usual."""
    from fedbandit.deploy.server import operator

    operator.pause(state)
    print("no new round begins until `fedbandit deploy resume`")


@app.command()
def resume(state: _State) -> None:
    """Begin rounds again after `pause`."""
    from fedbandit.deploy.server import operator

    operator.pause(state, False)
    print("rounds begin again")


@app.command()
def pin(
    state: _State,
    version: Annotated[int, typer.Argument(help="One of the versions that `status` lists.")],
) -> None:
    """Keep a model version: deploy nothing newer until `unpin`.

    Training continues. If another version is in use, the server returns to this one first, as
    `rollback` does.
    """
    from fedbandit.deploy.server import operator

    back = operator.pin(state, version)
    first = f"the server will roll back to model {version} at its next round; " if back else ""
    print(f"{first}nothing newer than model {version} is deployed until `fedbandit deploy unpin`")


@app.command()
def unpin(state: _State) -> None:
    """Deploy new models again after `pin`."""
    from fedbandit.deploy.server import operator

    given_up = operator.unpin(state)
    pending = "" if given_up is None else f"; the rollback to model {given_up} is given up"
    print(f"new models are deployed again{pending}")


@app.command()
def revoke(
    state: _State,
    node: Annotated[
        str, typer.Argument(metavar="NODE", help="A node's number or a device's name; see `nodes`.")
    ],
    undo: Annotated[bool, typer.Option("--undo", help="Allow it again.")] = False,
) -> None:
    """Exclude a node or a device from the next round on.

    A node with a key also loses its registration, so it cannot connect any more.
    """
    from fedbandit.deploy.flower.operate import unregister_node
    from fedbandit.deploy.server import operator

    operator.revoke(state, node, undo)
    print(f"{node} {'may take part again' if undo else 'is not asked any more'}")
    if not undo and unregister_node(state, node):
        print(f"{node} cannot connect any more; register its key again to let it in")


@app.command()
def rollback(
    state: _State,
    version: Annotated[int, typer.Argument(help="One of the versions that `status` lists.")],
) -> None:
    """Return to an earlier model version.

    Devices receive it as a new version, and training continues from it.
    """
    from fedbandit.deploy.server import operator

    operator.ask_rollback(state, version)
    print(f"the server will roll back to model {version} at its next round")


def _say(text: str) -> None:
    """Print a line with the time, at once: a service's log is read while it runs."""
    from fedbandit.core.logs import stamped

    print(stamped(text), flush=True)


def _security(insecure: bool, **files: Path | None) -> "Security":
    """Certificates and keys that were given; with `insecure` none may be."""
    from fedbandit.deploy.flower.processes import Security

    if insecure:
        refuse((any(files.values()), "--insecure: cannot be combined with certificates"))
        return Security()
    for name, path in files.items():
        option = f"--{name.replace('node_', '')}"
        if path is None:
            raise ConfigError(f"{option}: missing; use --insecure to run without TLS")
        if not path.is_file():
            raise ConfigError(f"{option}: {path}: no such file")
    return Security(**files)
