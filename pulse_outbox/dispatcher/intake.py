"""The intake: decides how much to claim, claims it, and knows when to sleep."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from pulse_outbox.dispatcher.jobs import Job, Released
from pulse_outbox.dispatcher.lanes import Lanes
from pulse_outbox.dispatcher.pace import Looks, Noise, Rate
from pulse_outbox.dispatcher.transactions import POOL_SIZE as TRANSACTIONS
from pulse_outbox.dispatcher.wakeup import commits_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from uuid import UUID

    from pulse_outbox.claims import Claim, Claimed
    from pulse_outbox.dispatcher.flushes import Flushes
    from pulse_outbox.dispatcher.jobs import InFlight
    from pulse_outbox.dispatcher.lanes import ClaimPlan, LaneKey
    from pulse_outbox.dispatcher.settings import DispatcherSettings
    from pulse_outbox.dispatcher.settling import Settler
    from pulse_outbox.dispatcher.slots import Slots
    from pulse_outbox.dispatcher.state import Tally
    from pulse_outbox.dispatcher.wakeup import Heard
    from pulse_outbox.handlers import Handler
    from pulse_outbox.store import Asking, Flush, Listing, Store

AHEAD = 0.1
"""How much work may wait in memory, in seconds of what is being completed at present."""
AHEAD_BATCHES = 4
LONGEST_WAIT = 0.3
"""After so long in memory, what exceeds AHEAD goes back, in seconds."""
COSTLY_NAP = 0.25
"""Where listings are costly, what gets due is found by asking the known lanes this often, in seconds."""
FIRST_NAP = 0.02
"""The first sleep after falling idle, in seconds; it doubles up to the poll interval."""
FIRST_NAP_DEAF = 0.002
"""The same while producers do not notify, so that polling is as quick as a notification."""
HEARING_NAP = 0.05
"""Producers that were told not to notify are told to again when the naps have become this long …"""
DEAF_LONGEST = 5.0
"""… or after so many seconds: as much may come in fewer commits by now."""
TOGETHER = 20
"""From how many on a batch stands for the leases of what is claimed, where that is quick work."""
PREPARED_TOPICS = 32
"""For how many topics, those that had work last, a claim is at hand while this sleeps."""
PREPARED_FOR = 2.0
"""How old such a claim may be before the next sleep, in seconds: it walks over all that has died since it was made."""


STOPPING = "stopping"
HOLD_PATIENCE = 3.0


@dataclass(slots=True, kw_only=True)
class _ClaimCall:
    """A claim that is about to be sent, under way, or whose answer was lost."""

    plan: ClaimPlan
    slots: int
    token: UUID
    claim: Asking[Claimed]
    made_at: float
    at: float = 0.0
    """When it was first sent, on the monotonic clock: its leases are not older."""
    is_asked: bool = False
    """Until its answer is taken in, or an error is."""
    listing: Asking[Listing] | None = None
    """That was sent behind it, and behind every other claim."""
    flush: Flush | None = None
    """Its answer does not wait for the disk: nothing that it took may start before this has succeeded."""

    @property
    def is_under_way(self) -> bool:
        """Whether its answer may still come without its being sent again."""
        return self.is_asked and not self.claim.is_lost


class Intake:
    """Claims for one process."""

    def __init__(
        self,
        store: Store,
        *,
        flushes: Flushes,
        settings: DispatcherSettings,
        handlers: Mapping[str, Handler],
        in_flight: InFlight,
        slots: Slots,
        settler: Settler,
        tally: Tally,
        say_sleeping: Callable[[bool], Awaitable[None]],
        suspects_due: Callable[[Sequence[LaneKey]], None],
    ) -> None:
        self._store = store
        self._flushes = flushes
        self._settings = settings
        self._lease = settings.seconds("lease")
        self._handlers = handlers
        self._topics = sorted(handlers)
        self._may_concern = {"", *handlers}
        self._limited = any(handler.concurrency or handler.transactional for handler in handlers.values())
        self._transactional = [topic for topic in self._topics if handlers[topic].transactional]
        self._budgets = [handlers[topic].retry.max_attempts for topic in self._topics]
        self._in_flight = in_flight
        self._slots = slots
        self._settler = settler
        self._tally = tally
        self._say_sleeping = say_sleeping
        self._suspects_due = suspects_due
        self._lanes = Lanes()
        self._looks = Looks(settings.seconds("poll"))
        self._rate = Rate(time.monotonic())
        self._relist = True
        self._guessed = True
        """There was no listing yet, or a claim without one since the last."""
        self._stirred = asyncio.Event()
        self._needs_room = False
        self._got_room = False
        """The last rest ended because a place had become free, and nothing was claimed since."""
        self._nap = FIRST_NAP
        self._deaf = False
        self._deaf_since = 0.0
        self._noise = Noise()
        self.nothing_due = asyncio.Event()
        """Set while the last listing showed nothing that could run now."""
        self._listings = 0
        self._empty_listing = 0
        """Which listing showed that."""
        self._is_looking = False
        """Somebody waits for a listing that shows nothing, however much it costs."""
        self._holds: set[str] = set()
        """Why nothing is claimed now: the process ends, or a suspect runs alone in it."""
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0
        self._calls: deque[_ClaimCall] = deque()
        """What was asked and not answered yet, in this order; at most two."""
        self._is_asleep = False
        """Nothing is under way, and only a wake-up or the time will change that."""
        self._prepared: dict[str, _ClaimCall] = {}
        """What to ask then, when it is woken for a topic."""
        self._backlog = False
        """The last claim brought a whole batch."""
        self._fruitless = False
        """The last claim found nothing of what was listed: somebody else has it locked."""

    def wake(self, heard: Sequence[Heard] = ()) -> None:
        """There is new work, or there may be."""
        topics = {topic for topic, _ in heard} & self._may_concern
        if topics or not heard:  # else others serve it
            self._wake_for(topics.pop() if len(topics) == 1 else "")
        self._noise.heard(commits_of(heard), time.monotonic())

    def _wake_for(self, topic: str) -> None:
        call = self._prepared.pop(topic, None) if self._is_asleep else None
        was_asleep, self._is_asleep = self._is_asleep, False
        if call is not None and self._fits(call) and not self._is_full():
            self._calls.append(call)
            self._send(call)
            self._guessed = True
            self._stirred.set()
            return
        if topic and was_asleep and not self._looks.are_costly and not self._lanes.knows(topic):
            self._guessed = True  # no lane that is known can be meant
            self._looks.list_at_once()
        self._look()

    def listening(self, is_up: bool) -> None:
        """Whether notifications come in, from now on."""
        self._noise.is_listening = is_up

    def _look(self) -> None:
        self._relist = True
        self._stirred.set()

    async def look_again(self) -> None:
        """Returns when a look that began after this call has shown nothing that could run now."""
        begun = self._listings
        self._is_looking = True
        try:
            while self._empty_listing <= begun:
                self.nothing_due.clear()
                self._looks.list_at_once()
                self._look()
                await self.nothing_due.wait()
        finally:
            self._is_looking = False

    def expect(self, seconds: float) -> None:
        """An event that this process had can run again after so long: it must not sleep past that."""
        if seconds <= 0:
            self.nothing_due.clear()
            self._look()
        elif self._alarm is None or time.monotonic() + seconds < self._alarm_at:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_at = time.monotonic() + seconds
            self._alarm = asyncio.get_running_loop().call_later(seconds, self._ring)

    def _ring(self) -> None:
        self._alarm = None  # what is due after this one, the listing will show
        self._look()

    def room_made(self) -> None:
        """A job has ended, or a result was stored."""
        if self._needs_room:
            self._got_room = True
            self._stirred.set()

    async def hold(self, why: str, *, patience: float = HOLD_PATIENCE) -> bool:
        """Claims nothing more until `let_go`, and says whether no claim is under way or unanswered any more.

        What a claim still brings after this goes back.
        """
        self._holds.add(why)
        give_up_at = time.monotonic() + patience
        while time.monotonic() < give_up_at and (
            self._slots.expected or any(call.is_under_way for call in self._calls)
        ):
            await asyncio.sleep(0.005)
        return not self._calls and not self._slots.expected

    def let_go(self, why: str) -> None:
        """Ends one hold; others may go on."""
        self._holds.discard(why)
        self._looks.list_at_once()  # what is still suspect, only that shows
        self._look()

    async def run(self) -> None:
        """Claims for ever."""
        while True:
            if not self._calls and (call := await self._next_claim()):
                self._calls.append(call)
            if self._calls:
                await self._claim(self._calls[0])

    async def shed(self) -> None:
        """Gives back what was claimed for quick jobs and waits behind slow ones: others may have room for it."""
        while True:
            await asyncio.sleep(AHEAD)
            rate = self._completion_rate()
            if self._slots.oldest_wait() > LONGEST_WAIT:
                for job in self._slots.take_back_beyond(int(rate * AHEAD)):
                    self._settler.add(Released(job))

    async def _next_claim(self) -> _ClaimCall | None:
        """What to claim next; None after a rest."""
        wanted = self._wanted()
        if wanted < 1:
            await self._wait_for_room()
            return None
        now = time.monotonic()
        also_known = self._looks.known_are_due(now)
        plan = self._lanes.plan(wanted, self._room_of, now, also_known=also_known)
        if plan and also_known:
            self._looks.known_asked(now)
        listing_is_due = self._looks.listing_is_due(now, work_is_known=plan is not None)
        woken = self._relist and plan is None
        if woken:
            self._relist = False
        # Woken, and nothing is left of what was listed: one call is mostly enough. What it does not find, the listing
        # after it shows, which must come: else a topic whose every job wakes this would keep all others from sight.
        if woken and not (self._guessed and listing_is_due) and (guess := self._guess(wanted)):
            self._guessed = True
            return self._call_of(guess, slots=self._slots.free)
        if listing_is_due or (woken and not self._looks.are_costly):
            await self._list()
            plan = None
        plan = plan or self._lanes.plan(wanted, self._room_of, time.monotonic())
        if plan is None or self._holds:
            await self._rest()
            return None
        return self._call_of(plan, slots=self._slots.free)

    def _guess(self, wanted: int) -> ClaimPlan | None:
        """A claim without a listing, where that can be made."""
        now = time.monotonic()
        if self._looks.are_costly:
            return self._lanes.guess_again(wanted, self._room_of, now)
        if self._limited:
            return None
        # One that has to find out what there is, is a listing too.
        guess = self._lanes.guess(wanted, now, anywhere=self._looks.last_was_quick())
        return guess or self._lanes.guess_again(wanted, self._room_of, now)

    def _call_of(self, plan: ClaimPlan, *, slots: int) -> _ClaimCall:
        token = uuid4()
        together = self._backlog and plan.limit >= TOGETHER
        flush = self._flushes.ready(self._store) if together else None
        claim = self._store.claim(
            limit=plan.limit,
            topics=self._topics,
            worker=self._settings.worker,
            lease=self._settings.lease_time,
            budgets=self._budgets,
            slots=slots,
            generations=self._settings.generations,
            lanes=plan.lanes,
            lapses=0,
            token=token,
            fresh=True,
            plain=plan.plain,
            together=together,
            unflushed=flush is not None,
        )
        return _ClaimCall(
            plan=plan, slots=slots, token=token, claim=claim, made_at=time.monotonic(), flush=flush
        )

    def _send(self, call: _ClaimCall) -> None:
        # Suspects are claimed beside this, and share the limits of handlers.
        self._in_flight.ask(call.token, call.plan.quotas.items())
        call.is_asked = True
        call.at = call.at or time.monotonic()
        call.claim.send()

    async def _claim(self, call: _ClaimCall) -> None:
        """One claim. After an error it stays unanswered and is asked again: what it took must not be forgotten."""
        if not call.is_asked:
            self._send(call)
        if len(self._calls) == 1 and call.listing is None:
            self._send_behind(call)
        try:
            claims = await call.claim
        except BaseException:
            call.is_asked = False
            raise
        self._calls.popleft()
        if len(claims) == 1:
            self._prepared.pop(claims[0].topic, None)  # its lane has moved on
        elif claims:
            self._prepared.clear()
        self._backlog = len(claims) >= self._settings.batch
        self._fruitless = bool(call.plan.keys) and not claims
        if claims and self._looks.are_costly:
            self._relist = True  # guess until nothing is found
        self._take_in(claims, call)
        if claims and len(claims) < call.plan.limit:
            await asyncio.sleep(0)  # handlers first, then the next question
        # else the database had better take the next ones while handlers run: there are more
        self._lanes.note(call.plan, claims)
        if claims:
            self._noise.claimed(len(claims), time.monotonic())
            if not self._calls:  # whose answers would have to wait
                await self._stop_listening_when_loud()
        if call.listing is not None:
            await self._take_listing(call.listing)

    def _send_behind(self, call: _ClaimCall) -> None:
        """In a backlog, what to ask right behind this claim: else the database would wait until its answer is read.

        Another claim, which may begin where this one does: the server gets to it when this one is over. And last a
        listing that is due. No claim is sent behind that: its rows would wait for it, and it would not know what the
        listing shows.
        """
        batch, now = self._settings.batch, time.monotonic()
        if not self._backlog or call.plan.limit < batch:
            return
        if following := self._following(call, now):
            self._calls.append(following)
            self._send(following)
        if self._looks.listing_is_due(now, work_is_known=True):
            last = self._calls[-1]
            last.listing = self._ask_for_lanes()
            last.listing.send()

    def _following(self, call: _ClaimCall, now: float) -> _ClaimCall | None:
        batch = self._settings.batch
        # The slots that are free are promised to those with a budget of one that the first one finds.
        if self._wanted(coming=batch) < batch or self._lanes.wait_for_slot(self._room_of):
            return None
        if self._noise.is_loud(now) and not self._deaf:
            return None  # what has to be said then must not come between a claim and its answer
        also_known = self._looks.known_are_due(now)
        plan = self._lanes.plan(batch, self._room_of, now, also_known=also_known, behind=call.plan)
        if plan is None:
            return None
        if also_known:
            self._looks.known_asked(now)
        return self._call_of(plan, slots=0)

    # How much

    def _wanted(self, coming: int = 0) -> int:
        """How many to claim now: what can start at once, and about 100 ms of work beyond, less what is *coming*."""
        if self._is_full():
            return 0
        free = self._slots.free
        if self._lanes.wait_for_slot(self._room_of):
            # While others are claimed ahead, no slot would ever be free for it.
            return min(self._settings.batch, free)
        ahead = int(min(self._completion_rate() * AHEAD, AHEAD_BATCHES * self._settings.batch))
        room = free + max(0, ahead - self._slots.waiting) - coming
        # Whole batches once there is work ahead: claims are cheaper by the dozen.
        if not free and room < min(self._settings.batch, ahead // 2):
            return 0
        return min(self._settings.batch, room)

    def _is_full(self) -> bool:
        """Whether nothing may be claimed, or the database does not take results: do not add to them."""
        return bool(self._holds) or len(self._settler) >= 4 * self._settings.batch

    def _room_of(self, topic: str) -> int:
        """How many more of a topic may be claimed: by its handler's limit, and by what transactions share."""
        handler = self._handlers[topic]
        room = self._settings.batch
        if handler.concurrency is not None:
            room = handler.concurrency - self._in_flight.of_topic(topic)
        if handler.transactional:
            used = sum(self._in_flight.of_topic(other) for other in self._transactional)
            room = min(room, -(-(TRANSACTIONS - used) // len(self._transactional)))
        return room

    def _completion_rate(self) -> float:
        """Jobs ended per second, over the last moments."""
        return self._rate.per_second(self._slots.ended, time.monotonic())

    # What

    async def _list(self) -> None:
        await self._take_listing(self._ask_for_lanes())

    def _ask_for_lanes(self) -> Asking[Listing]:
        self._relist = False
        self._guessed = False
        self._listings += 1
        return self._store.lanes(self._topics, self._settings.generations)

    async def _take_listing(self, asked: Asking[Listing]) -> None:
        listing = await asked
        now = time.monotonic()
        self._lanes.refresh(listing, now)
        self._looks.listed(now, listing.took)
        if suspects := self._lanes.suspects(now):
            self._suspects_due(suspects)

    def _take_in(self, claims: Sequence[Claim], call: _ClaimCall) -> None:
        ours = self._in_flight.answered(call.token)
        if not claims:
            return
        self.nothing_due.clear()
        self._got_room = False
        self._nap = FIRST_NAP_DEAF if self._deaf else FIRST_NAP
        self._tally.claimed += len(claims)
        now = time.monotonic()
        if not len(self._in_flight):
            self._rate.restart(self._slots.ended, now)
        jobs = [Job(claim, self._handlers[claim.topic], call.at, self._lease, now) for claim in claims]
        self._in_flight.add(jobs)
        if not ours or self._holds:
            self._give_back(jobs)
        elif call.flush is None:
            self._slots.add(jobs)
        else:
            self._slots.expect(jobs)
            call.flush.send(lambda succeeded: self._flushed(jobs, succeeded))

    def _flushed(self, jobs: list[Job], succeeded: bool) -> None:
        self._slots.expect_no_more(jobs)
        if not succeeded:
            self._flushes.failed()
        if succeeded and not self._holds:
            self._slots.add(jobs)
        else:
            self._give_back(jobs)  # a server that has crashed may know nothing of the claim

    def _give_back(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.withdraw():
                self._settler.add(Released(job))

    # When

    async def _wait_for_room(self) -> None:
        self._needs_room = True
        self._stirred.clear()
        poll = self._settings.seconds("poll")
        await self._sleep(poll)
        was_listed = self._looks.listed_within(max(poll, self._looks.interval), time.monotonic())
        if not was_listed and not self._holds and self._wanted() < 1:
            await self._list()  # for suspects, which have room elsewhere
        self._needs_room = self._got_room = False

    async def _rest(self) -> None:
        """No lane is worth asking: looks at them once more, and sleeps until one is due."""
        pause = 0.0 if self._guessed else self._nap / 2
        longest = self._nap
        if self._looks.are_costly and not self._is_looking:
            pause = self._looks.seldom
            longest = min(longest, COSTLY_NAP)
        elif self._got_room:  # which tells nothing new about the lanes
            pause = max(pause, self._looks.interval)
            longest = min(longest, pause)
        if not self._looks.listed_within(pause, time.monotonic()):
            await self._list()
        self._stirred.clear()
        self._got_room = False
        now = time.monotonic()
        if self._lanes.plan(1, self._room_of, now) is not None and not self._fruitless:
            return
        due = self._lanes.next_due()
        # There is work, for handlers that are at their limit; or others have it.
        work_is_left = due is not None and due <= now
        if not work_is_left and not self._guessed:
            self._empty_listing = self._listings
            self.nothing_due.set()
        self._needs_room = work_is_left or (self._looks.are_costly and self._lanes.at_limit(self._room_of))
        if self._nap > HEARING_NAP or now - self._deaf_since > DEAF_LONGEST:
            self._deaf = False
            await self._say_sleeping(True)
        if not self._relist:  # a wake-up may have come while this was busy falling asleep
            self._prepare()
            self._is_asleep = True
            try:
                await self._sleep(max(0.0, min([now + longest, *self._lanes.due_after(now)]) - now))
            finally:
                self._is_asleep = False
        self._needs_room = False
        if not self._got_room:
            self._nap = min(self._nap * 2, self._settings.seconds("poll"))
        if self._looks.are_costly:
            self._relist = True
            self._mention_suspects_since(now)
        elif not self._got_room:
            self._looks.list_at_once()

    def _prepare(self) -> None:
        """Makes ready what to ask as soon as this is woken for a topic: making it takes longer than sending it."""
        now = time.monotonic()
        before, self._prepared = self._prepared, {}
        if self._deaf or self._guessed or self._looks.are_costly or self._is_full():
            return
        free = self._slots.free
        for topic in self._lanes.latest_topics(PREPARED_TOPICS):
            call = before.get(topic)
            if call is None or not self._fits(call) or now > call.made_at + PREPARED_FOR:
                limit = self._at_once(topic, free)
                guess = self._lanes.guess_at(topic, limit, now) if limit > 0 else None
                if guess is None:
                    continue
                call = self._call_of(guess, slots=free)
                call.claim.prepare()
            self._prepared[topic] = call

    def _fits(self, call: _ClaimCall) -> bool:
        """Whether a claim that was made for a topic earlier is what would be made now."""
        free = self._slots.free
        [(topic, limit)] = call.plan.quotas.items()
        return call.slots == free and limit == self._at_once(topic, free)

    def _at_once(self, topic: str, free: int) -> int:
        """How many of a topic could start now in so many free slots."""
        return min(self._settings.batch, free, self._room_of(topic))

    def _mention_suspects_since(self, then: float) -> None:
        """Those that have become due since then: no listing comes to show them."""
        suspects = self._lanes.suspects(time.monotonic())
        if suspects != self._lanes.suspects(then):
            self._suspects_due(suspects)

    async def _sleep(self, seconds: float) -> None:
        alarm = asyncio.get_running_loop().call_later(seconds, self._stirred.set)
        try:
            await self._stirred.wait()
        finally:
            alarm.cancel()

    async def _stop_listening_when_loud(self) -> None:
        now = time.monotonic()
        if not self._deaf and self._noise.is_loud(now):
            self._deaf, self._deaf_since = True, now
            await self._say_sleeping(False)
