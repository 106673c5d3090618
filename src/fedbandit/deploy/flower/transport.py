"""Messages as Flower's records, and Flower's grid as a non-blocking transport.

The only module that knows how arrays travel: updates are compressed here and nowhere else.
"""

import copy
import json
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.serverapp import Grid
from flwr.superlink.grid.http_grid import HttpGrid

from fedbandit.core.errors import DataError
from fedbandit.deploy.messages import Kind, Reply, Request

SEALED = "sealed"
_ZLIB = "zlib"
_LIKE = " like"  # behind the name of a compressed array: its type and shape
GRACE = 600.0  # seconds by which devices' clocks may be wrong: Flower drops messages by wall clock


def to_records(
    facts: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    sealed: Mapping[str, Any] | None = None,
    *,
    compress: bool = False,
    made: dict[int, Array] | None = None,
) -> RecordDict:
    """One text, some arrays and perhaps a step of a secure sum, ready to be sent.

    Facts travel as JSON in the record `facts`, arrays in `arrays`, and a step of a secure sum in
    `sealed`. With `compress`, arrays travel in the record `zlib` where that is less: the compressed
    bytes by name, and beside them the type and shape. Arrays that several messages share are `made`
    once.
    """
    made = {} if made is None else made
    whole, packed = dict(arrays), dict[str, Any]()
    for name, array in arrays.items() if compress else ():
        small = zlib.compress(np.ascontiguousarray(array).data, 6) if array.size else b""
        if 0 < len(small) < array.nbytes:
            packed |= {name: small, f"{name}{_LIKE}": json.dumps([array.dtype.str, array.shape])}
            del whole[name]
    for array in whole.values():
        if id(array) not in made:
            made[id(array)] = Array(np.ascontiguousarray(array))
    content = RecordDict(
        {
            "facts": ConfigRecord({"json": json.dumps(dict(facts)), "accepts": _ZLIB}),
            "arrays": ArrayRecord({name: made[id(array)] for name, array in whole.items()}),
        }
    )
    if packed:
        content.config_records[_ZLIB] = ConfigRecord(packed)
    if sealed:
        content.config_records[SEALED] = ConfigRecord(dict(sealed))
    return content


def accepts_compressed(content: RecordDict) -> bool:
    """Whether the sender of a message reads compressed arrays."""
    return bool(content["facts"].get("accepts") == _ZLIB)


def from_records(
    content: RecordDict, most: int = 1 << 16
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The facts and arrays that `to_records` was given; a compressed one has at most `most`
    bytes.
    """
    try:
        facts = json.loads(str(content["facts"]["json"]))
        arrays = {name: array.numpy() for name, array in content.array_records["arrays"].items()}
        packed: dict[str, Any] = dict(content.config_records.get(_ZLIB, {}))
        for name in [name for name in packed if not name.endswith(_LIKE)]:
            arrays[name] = _unpacked(packed[name], json.loads(packed[f"{name}{_LIKE}"]), most)
    except Exception as error:  # whatever a stranger's bytes make a parser do
        raise DataError(f"unreadable: {error!r}"[:300]) from None
    if not isinstance(facts, dict):
        raise DataError(f"unreadable: a {type(facts).__name__} where facts were expected")
    return facts, arrays


def _unpacked(payload: Any, like: Any, most: int) -> np.ndarray:
    """A compressed array; what would become larger than expected is never made."""
    reader = zlib.decompressobj()
    plain = reader.decompress(payload, most + 1)
    if len(plain) > most or not reader.eof:
        raise ValueError(f"a compressed array of more than {most} bytes, or cut off")
    return np.frombuffer(plain, np.dtype(like[0])).reshape(like[1])


def sealed_in(content: RecordDict) -> dict[str, Any]:
    """The step of a secure sum that `to_records` was given."""
    return dict(content.config_records.get(SEALED, {}))


TYPES: dict[Kind, str] = {
    "install": "query.fedbandit_install",
    "ready": "query.fedbandit_ready",
    "train": "train.fedbandit_round",
    "secure": "train.fedbandit_secure",
    "judge": "query.fedbandit_judge",
}


class GridTransport:
    """Sends to and receives from the nodes of a SuperLink; never waits for one.

    Arrays that several requests of one call share travel as one object. A message that the
    SuperLink does not take, because its node has left, comes back as a failed reply.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        # No other grid has uploads to wait for.
        self._fetcher = ReplyFetcher(grid) if isinstance(grid, HttpGrid) else None
        self._largest = 0  # bytes of an array that was sent: no reply holds a larger one
        self._numbers = count()
        self._undeliverable: list[Reply] = []

    def close(self) -> None:
        """Give up what is still being fetched."""
        if self._fetcher is not None:
            self._fetcher.close()

    def nodes(self) -> list[int]:
        """The nodes in reach now, by number."""
        return sorted(self._grid.get_node_ids())

    def send(self, requests: Sequence[Request]) -> list[str]:
        """Hand requests to the SuperLink; a ticket for each."""
        made: dict[int, Array] = {}
        sizes = (array.nbytes for request in requests for array in request.arrays.values())
        self._largest = max([self._largest, *sizes])
        messages = [
            Message(
                to_records(request.facts, request.arrays, request.sealed, made=made),
                dst_node_id=request.node,
                message_type=TYPES[request.kind],
                ttl=request.seconds + GRACE,
            )
            for request in requests
        ]
        tickets = list(self._grid.push_messages(messages))  # Flower refuses a generator
        return [ticket or self._never_sent() for ticket in tickets]

    def receive(self, tickets: Collection[str]) -> list[Reply]:
        """The replies that are whole by now; each is given once."""
        failed, self._undeliverable = self._undeliverable, []
        asked = [ticket for ticket in tickets if not ticket.startswith("-")]
        if not asked:
            return failed
        if self._fetcher is not None:
            return failed + self._fetcher.replies(asked, self._largest)
        found = self._grid.pull_messages(asked)
        return failed + [_reply(message, self._largest) for message in found]

    def _never_sent(self) -> str:
        """A ticket for a message that the SuperLink did not take; its failure is there to be
        received.
        """
        ticket = f"-{next(self._numbers)}"
        self._undeliverable.append(Reply(ticket, error="the node has left"))
        return ticket


def _reply(message: Message, most: int) -> Reply:
    """A message as a reply; arrays of more than `most` bytes are not unpacked."""
    ticket = message.metadata.reply_to_message_id
    if message.has_error():
        return Reply(
            ticket, error=f"Flower's error {message.error.code}: {message.error.reason}"[:300]
        )
    content = message.content
    try:
        facts, arrays = from_records(content, most)
        reply = Reply(ticket, facts, arrays, sealed=sealed_in(content))
        packed = [v for v in content.config_records.get(_ZLIB, {}).values() if isinstance(v, bytes)]
        if packed:
            reply = replace(reply, travelled=sum(map(len, packed)))
        return reply
    except DataError as problem:
        return Reply(ticket, error=str(problem))


_LONGEST_UPLOAD = (
    180.0  # seconds that one reply may take to come in; the SuperLink gives it up then, too
)
# seconds after which a fetch counts as waiting for its device, and no longer as work that is done
_SLOW = 5.0
_AT_ONCE = 8  # replies that are fetched at the same time, beside those that are slow
_MOST_THREADS = 500


class ReplyFetcher:
    """Fetches replies beside the round: a reply whose upload has not ended is there, but cannot be
    read yet.

    Flower's own pulling waits for such an upload, one reply after the other, for as long as it
    takes. Here one thread asks which replies have come, each of them is fetched by another, and
    a caller gets those that are whole.
    """

    def __init__(
        self,
        grid: HttpGrid,
        limit: float = _LONGEST_UPLOAD,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grid, self._limit, self._clock = grid, limit, clock
        self._lock = threading.Lock()
        self._looks = threading.Event()
        self._wanted: set[str] = set()
        self._most = 0  # bytes of a compressed array
        self._arrived: deque[tuple[str, PullAppMessagesResponse]] = deque()  # not fetched yet
        self._fetching: dict[str, float] = {}  # ticket -> since when
        self._whole: list[Reply] = []
        self._failure: Exception | None = None
        self._closed = False
        self._looking: threading.Thread | None = None

    def replies(self, tickets: Collection[str], most: int) -> list[Reply]:
        """Those of the replies that are whole by now; each is given once."""
        self._most = most
        if self._looking is None:
            self._looking = threading.Thread(target=self._look, name="replies", daemon=True)
            self._looking.start()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            found, self._whole = self._whole, []
            self._wanted = set(tickets) - {reply.ticket for reply in found}
        self._looks.set()
        return found

    def close(self) -> None:
        """Have every thread end, the slow ones at their next look."""
        self._closed = True
        self._looks.set()

    def _look(self) -> None:
        while True:
            self._looks.wait()
            self._looks.clear()
            if self._closed:
                return
            with self._lock:
                here = {ticket for ticket, _ in self._arrived} | {
                    reply.ticket for reply in self._whole
                }
                asked = sorted(self._wanted - self._fetching.keys() - here)
            try:
                found = self._grid._runtime_client.PullMessages(
                    PullAppMessagesRequest(message_ids=asked)
                )
            except Exception as error:  # raised where the replies are asked for
                self._failure = error
                return
            with self._lock:
                self._arrived += _one_by_one(found)
            self._fetch_more()

    def _fetch_more(self) -> None:
        with self._lock:
            busy = sum(self._clock() - since < _SLOW for since in self._fetching.values())
            while self._arrived and busy < _AT_ONCE and len(self._fetching) < _MOST_THREADS:
                ticket, one = self._arrived.popleft()
                self._fetching[ticket] = self._clock()
                busy += 1
                threading.Thread(target=self._fetch, args=(ticket, one), daemon=True).start()

    def _fetch(self, ticket: str, one: PullAppMessagesResponse) -> None:
        until = self._clock() + self._limit
        grid: Any = copy.copy(
            self._grid
        )  # without its client: whatever this thread asks goes through the one below
        grid._client = _OneReply(
            self._grid._runtime_client, one, lambda: self._closed or self._clock() >= until
        )
        try:
            replies = [_reply(message, self._most) for message in grid.pull_messages([ticket])]
        except Exception as error:  # whatever is wrong with one device's reply concerns no other
            replies = [Reply(ticket, error=f"its reply could not be fetched: {error!r}"[:300])]
        with self._lock:
            del self._fetching[ticket]
            self._whole += replies
        self._fetch_more()


def _one_by_one(found: PullAppMessagesResponse) -> Iterable[tuple[str, PullAppMessagesResponse]]:
    """Each reply by its ticket, as if it had been the only one."""
    for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
        one = PullAppMessagesResponse(messages_list=[message], message_object_trees=[tree])
        yield message.metadata.reply_to_message_id, one


class _OneReply:
    """The client of a grid, for one reply that the SuperLink has named already; stops asking for it
    when it is over.
    """

    def __init__(self, client: Any, one: PullAppMessagesResponse, over: Callable[[], bool]) -> None:
        self._client, self._one, self._over = client, one, over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def PullMessages(self, _: PullAppMessagesRequest) -> PullAppMessagesResponse:
        return self._one

    def PullObject(self, request: Any) -> Any:
        if self._over():
            raise TimeoutError("its upload has not ended in time")
        return self._client.PullObject(request)
