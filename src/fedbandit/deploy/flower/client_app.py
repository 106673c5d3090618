"""The client app that Flower runs on a device: opens the agent's folder, answers one request, and lets go of it.

The folder is `agent-dir` of the node's configuration. The app on the device uses the same folder at the same time.
With `secure-aggregation=true` there, or in `make_client_app`, what a log says leaves the device in secure sums only.
Whom it believes in them stands there too (`roster`, `node-key`), and nowhere in an app, which comes from the server.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from fedbandit.deploy.device.agent import Agent
from fedbandit.deploy.device.instructions import Limits
from fedbandit.deploy.device.participant import Participant
from fedbandit.deploy.device.secure_round import Identity, SecureRounds
from fedbandit.deploy.flower.transport import TYPES, from_records, sealed_in, to_records
from fedbandit.deploy.messages import with_protocol

_IN_CLEAR = {TYPES["train"], TYPES["judge"]}


def only_sums(required: Callable[[Context], bool]) -> Mod:
    """A mod that refuses, where `required`, any request for what a log says in clear."""

    def guard(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type not in _IN_CLEAR or not required(context):
            return call_next(message, context)
        facts, _ = from_records(message.content)
        problem = "this device takes part in secure sums only"
        return Message(
            to_records(with_protocol({"token": facts.get("token"), "problem": problem}), {}),
            reply_to=message,
        )

    return guard


def make_client_app(
    *,
    open_agent: Callable[[Context], Agent] | None = None,
    trusted: Collection[str] = (),
    after_install: Callable[[Agent, Context], None] | None = None,
    secure_aggregation: bool = False,
    limits: Limits | None = None,
) -> ClientApp:
    """A client app. `open_agent` makes the agent in place of the one in `agent-dir`; `trusted` is as in `Agent`.

    With `secure_aggregation` it refuses every request for an update, or for sums of its log alone, in clear.
    `limits` are the most that it does for a server.
    """

    def of_node(context: Context) -> Agent:
        return Agent(Path(str(context.node_config["agent-dir"])), trusted=trusted)

    def secure(context: Context) -> bool:
        return secure_aggregation or bool(context.node_config.get("secure-aggregation", False))

    @contextmanager
    def participant_of(context: Context) -> Iterator[Participant]:
        def installed(agent: Agent) -> None:
            if after_install is not None:
                after_install(agent, context)

        with (open_agent or of_node)(context) as agent:
            yield Participant(agent, trusted=trusted, after_install=installed, limits=limits)

    def answer(kind: str, message: Message, context: Context) -> Message:
        with participant_of(context) as participant:
            said = participant.answer(kind, *from_records(message.content))
        return Message(to_records(*said), reply_to=message)

    app = ClientApp(mods=[only_sums(secure)])

    @app.query("fedbandit_install")
    def install(message: Message, context: Context) -> Message:
        return answer("install", message, context)

    @app.query("fedbandit_judge")
    def judge(message: Message, context: Context) -> Message:
        return answer("judge", message, context)

    @app.train("fedbandit_round")
    def train(message: Message, context: Context) -> Message:
        return answer("train", message, context)

    @app.query("fedbandit_ready")
    def ready(message: Message, context: Context) -> Message:
        with participant_of(context) as participant:
            rounds = SecureRounds(participant, context.node_id, identity_of(context))
            facts, sealed = rounds.ready(*from_records(message.content))
        return Message(to_records(facts, {}, sealed), reply_to=message)

    @app.train("fedbandit_secure")
    def step(message: Message, context: Context) -> Message:
        with participant_of(context) as participant:
            rounds = SecureRounds(participant, context.node_id, identity_of(context))
            facts, sealed = rounds.step(*from_records(message.content), sealed_in(message.content))
        return Message(to_records(facts, {}, sealed), reply_to=message)

    return app


def identity_of(context: Context) -> Identity:
    """Key and roster that the node's configuration names."""
    roster, key = (context.node_config.get(name) for name in ("roster", "node-key"))
    return Identity(
        roster=None if roster is None else Path(str(roster)),
        key=None if key is None else Path(str(key)),
        unsigned=bool(context.node_config.get("unsigned-keys", False)),
    )


app = make_client_app()
