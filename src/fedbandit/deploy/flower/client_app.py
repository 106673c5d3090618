"""The client app that Flower runs on a device: opens the agent's folder, answers one request, and lets go of it.

The folder is `agent-dir` of the node's configuration. The app on the device uses the same folder at the same time.
With `secure-aggregation=true` there, or in `make_client_app`, what a log says leaves the device in secure sums only.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage
from flwr.compat.common.recorddict_compat import fitres_to_recorddict

from fedbandit.core.errors import DataError
from fedbandit.deploy.device.agent import Agent
from fedbandit.deploy.device.instructions import Limits, check_understood
from fedbandit.deploy.device.participant import Participant
from fedbandit.deploy.flower.transport import from_records, sealed_in, to_records
from fedbandit.deploy.messages import with_protocol
from fedbandit.deploy.secure_sums import LEAST, LEVELS, MODULUS, RANGE, STEP

_NOTHING_OF_THE_LOG = {"query.fedbandit_install", "query.fedbandit_ready"}


_IN_CLEAR = {"train.fedbandit_round", "query.fedbandit_judge"}


_TERMS = {Key.CLIPPING_RANGE: RANGE, Key.TARGET_RANGE: LEVELS, Key.MOD_RANGE: MODULUS, Key.MAX_WEIGHT: 1.0}


def only_sums(required: Callable[[Context], bool]) -> Mod:
    """A mod to go before Flower's: refuses bad terms and, where `required`, any request for what a log says in clear.

    Of an answer it lets through the protocol's own message and the token of the round, nothing else.
    """

    def guard(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        kind = message.metadata.message_type
        if kind in _NOTHING_OF_THE_LOG or (kind in _IN_CLEAR and not required(context)):
            return call_next(message, context)
        facts, _ = from_records(message.content)
        token = with_protocol({"token": facts.get("token")})
        if kind != "train" and required(context):
            problem: str | None = "this device takes part in secure sums only"
        elif kind != "train":
            problem = f"this device does not know requests of the kind {kind[:50]!r}; update its fedbandit"
        else:
            problem = _problem(message, facts)
        if problem is not None:
            return Message(to_records({**token, "problem": problem}, {}), reply_to=message)
        answer = call_next(message, context)
        return Message(to_records(token, {}, sealed_in(answer.content)), reply_to=message)

    return guard


def as_result(levels: np.ndarray) -> RecordDict:
    """Points of the grid as Flower's SecAgg+ takes them from the app, with weight one; its rounding leaves them."""
    parameters = ndarrays_to_parameters([levels * STEP - RANGE])
    return fitres_to_recorddict(FitRes(Status(Code.OK, ""), parameters, 1, {}), False)


def _problem(message: Message, facts: Mapping[str, Any]) -> str | None:
    try:
        check_understood(facts)
        return bad_terms(sealed_in(message.content), message.metadata.dst_node_id)
    except DataError as error:
        return str(error)
    except (KeyError, TypeError) as error:
        return f"not a message of SecAgg+: {error!r}"[:300]


def bad_terms(said: Mapping[str, Any], own: int) -> str | None:
    """Why a device with that node id does not go along with a message of the protocol; None if it does."""
    stage = said[Key.STAGE]
    if stage == Stage.SETUP:
        for name, value in _TERMS.items():
            if said[name] != value:
                return f"{name} is {said[name]}, should be {value}"
        if not said[Key.SHARE_NUMBER] / 2 < said[Key.THRESHOLD] <= said[Key.SHARE_NUMBER]:
            return f"{said[Key.THRESHOLD]} of {said[Key.SHARE_NUMBER]} shares would do: not more than half"
        together = said[Key.SHARE_NUMBER]
    elif stage == Stage.SHARE_KEYS:
        together = len(said) - 1
    elif stage == Stage.COLLECT_MASKED_VECTORS:
        together = len(set(said[Key.SOURCE_LIST]) | {own})
    elif stage == Stage.UNMASK:
        active, dead = set(said[Key.ACTIVE_NODE_ID_LIST]), set(said[Key.DEAD_NODE_ID_LIST])
        if active & dead or own not in active:
            return "asked for both secrets of one device, or as if this one had dropped out"
        together = len(active)
    else:
        return f"no such step: {stage!r}"[:100]
    return f"{together} devices are too few to hide among" if together < LEAST else None


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

    app = ClientApp(mods=[only_sums(secure), secaggplus_mod])

    @app.query("fedbandit_install")
    def install(message: Message, context: Context) -> Message:
        return answer("install", message, context)

    @app.query("fedbandit_ready")
    def ready(message: Message, context: Context) -> Message:
        return answer("ready", message, context)

    @app.query("fedbandit_judge")
    def judge(message: Message, context: Context) -> Message:
        return answer("judge", message, context)

    @app.train("fedbandit_round")
    def train(message: Message, context: Context) -> Message:
        return answer("train", message, context)

    @app.train()
    def contribute(message: Message, context: Context) -> Message:
        with participant_of(context) as participant:
            vector = participant.contribute(*from_records(message.content))
        return Message(as_result(vector), reply_to=message)

    return app


app = make_client_app()
