"""The client app that Flower runs on a device: opens the agent's folder, answers one request, and
closes it.

The folder is `agent-dir` of the node's configuration. The app on the device uses the same folder at
the same time. With `secure-aggregation=true` there, or in `make_client_app`, what a log says leaves
the device in secure sums only. Whom it believes in them stands there too (`roster`, `node-key`),
and nowhere in an app, which comes from the server.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedbandit.deploy.device.agent import Agent
from fedbandit.deploy.device.device_identity import Limits
from fedbandit.deploy.device.participant import Participant
from fedbandit.deploy.device.secure_round import Identity
from fedbandit.deploy.flower.transport import (
    TYPES,
    accepts_compressed,
    from_records,
    sealed_in,
    to_records,
)
from fedbandit.deploy.messages import Kind, Request
from fedbandit.deploy.secure_sums import SecureMinimum


def make_client_app(
    *,
    open_agent: Callable[[Context], Agent] | None = None,
    trusted: Collection[str] = (),
    after_install: Callable[[Agent, Context], None] | None = None,
    secure_aggregation: bool = False,
    limits: Limits | None = None,
) -> ClientApp:
    """A client app. `open_agent` makes the agent in place of the one in `agent-dir`.

    With `secure_aggregation` it refuses every request for an update, or for sums of its log alone,
    in clear. `trusted` is as in `Agent`, and `limits` as in `Participant`.
    """

    def of_node(context: Context) -> Agent:
        return Agent(Path(str(context.node_config["agent-dir"])), trusted=trusted)

    def answer(kind: Kind, message: Message, context: Context) -> Message:
        def installed(agent: Agent) -> None:
            if after_install is not None:
                after_install(agent, context)

        own = context.node_config
        request = Request(
            kind, context.node_id, *from_records(message.content), 0.0, sealed_in(message.content)
        )
        with (open_agent or of_node)(context) as agent:
            reply = Participant(
                agent,
                trusted=trusted,
                after_install=installed,
                limits=_limits(limits or Limits(), own.get("min-cohort")),
                secure_only=secure_aggregation or bool(own.get("secure-aggregation", False)),
                identity=identity_of(context),
            ).reply(request)
        compress = accepts_compressed(message.content)
        content = to_records(reply.facts, reply.arrays, reply.sealed, compress=compress)
        return Message(content, reply_to=message)

    app = ClientApp()
    for kind, name in TYPES.items():
        category, _, action = name.partition(".")
        register = app.train if category == "train" else app.query

        @register(action)
        def _(message: Message, context: Context, kind: Kind = kind) -> Message:
            return answer(kind, message, context)

    return app


def identity_of(context: Context) -> Identity:
    """Key and roster that the node's configuration names."""
    roster, key = (context.node_config.get(name) for name in ("roster", "node-key"))
    return Identity(
        roster=None if roster is None else Path(str(roster)),
        key=None if key is None else Path(str(key)),
        unsigned=bool(context.node_config.get("unsigned-keys", False)),
    )


def _limits(limits: Limits, cohort: object) -> Limits:
    """The app's limits, with the larger of its minimum cohort and the node's."""
    if not isinstance(cohort, int):
        return limits
    least = limits.secure
    return replace(limits, secure=SecureMinimum(max(least.cohort, cohort), least.threshold))


app = make_client_app()
