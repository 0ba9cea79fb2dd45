"""Real event loops in threads: each reader gets its own text, whole, in order, once; nothing piles up."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from llm.delivery import Completion, Delivery, Delta, OutputSink
from llm.exceptions import EngineDead, SequenceFailed
from llm.messages import TokenLogprob
from llm.sequence import FinishReason

END = Completion(FinishReason.LENGTH, None, 3, 100, 0, 7, False, None)


@contextmanager
def loop_in_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def read_all(sink: OutputSink) -> Delta:
    whole = Delta()
    while whole.completion is None:
        whole.merge(await sink.get())
    return whole


def word(i: int) -> Delta:
    return Delta(text=f"{i} ", token_ids=[i], logprobs=[TokenLogprob(i, -0.5)])


def deliver(delivery: Delivery, sinks: list[OutputSink], steps: int) -> None:
    """What an engine thread does."""
    for i in range(steps):
        for sink in sinks:
            delivery.add(sink, word(i))
        delivery.post()
    for sink in sinks:
        delivery.add(sink, Delta(completion=END))
    delivery.post()


async def test_a_reader_waits_for_the_first_delta() -> None:
    sink, delivery = OutputSink(asyncio.get_running_loop()), Delivery()
    reading = asyncio.create_task(sink.get())
    await asyncio.sleep(0)
    assert not reading.done()
    delivery.add(sink, word(1))
    assert not reading.done()
    delivery.post()
    assert (await reading).text == "1 "


async def test_a_slow_reader_gets_all_of_it_merged() -> None:
    sink, delivery = OutputSink(asyncio.get_running_loop()), Delivery()
    await asyncio.to_thread(deliver, delivery, [sink], 100)
    delta = await sink.get()
    assert delta.text == "".join(f"{i} " for i in range(100))
    assert delta.token_ids == list(range(100))
    assert [logprob.token_id for logprob in delta.logprobs] == list(range(100))
    assert delta.completion is END


async def test_what_was_posted_step_by_step_and_not_read_is_merged_too() -> None:
    loop = asyncio.get_running_loop()
    sink, delivery = OutputSink(loop), Delivery()
    for i in range(3):
        delivery.add(sink, word(i))
        delivery.post()
        fetched = loop.create_future()
        loop.call_soon(fetched.set_result, None)
        await fetched
    assert (await sink.get()).token_ids == [0, 1, 2]


def test_a_loop_that_stands_still_has_one_callback_waiting() -> None:
    """Whatever happens while it stands; and a step wakes a loop once, however many sinks it feeds."""
    loop = asyncio.new_event_loop()
    try:
        woken = []
        wake = loop.call_soon_threadsafe

        def counting(*args: object, **options: object) -> asyncio.Handle:
            woken.append(args)
            return wake(*args, **options)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
        sinks, delivery = [OutputSink(loop) for _ in range(8)], Delivery()
        deliver(delivery, sinks, 1000)
        assert len(woken) == 1
        for whole in loop.run_until_complete(gather(sinks)):
            assert whole.token_ids == list(range(1000))
        deliver(delivery, sinks, 1)
        assert len(woken) == 2
    finally:
        loop.close()


async def gather(sinks: list[OutputSink]) -> list[Delta]:
    return await asyncio.gather(*(read_all(sink) for sink in sinks))


def test_several_loops_each_get_their_own() -> None:
    with loop_in_a_thread() as one, loop_in_a_thread() as other:
        sinks = [OutputSink(loop) for loop in (one, other, one, other)]
        reading = [asyncio.run_coroutine_threadsafe(read_all(sink), sink.loop) for sink in sinks]
        deliver(Delivery(), sinks, 500)
        for future in reading:
            assert future.result(30).token_ids == list(range(500))


def test_several_engines_threads_lose_nothing() -> None:
    """Order within a sink holds while many threads add and post at once."""
    delivery = Delivery()
    with loop_in_a_thread() as loop:
        sinks = [OutputSink(loop) for _ in range(6)]
        reading = [asyncio.run_coroutine_threadsafe(read_all(sink), loop) for sink in sinks]
        threads = [threading.Thread(target=deliver, args=(delivery, [sink], 500)) for sink in sinks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for future in reading:
            assert future.result(30).token_ids == list(range(500))


def test_a_closed_loop_is_skipped_and_the_others_are_served() -> None:
    closed = asyncio.new_event_loop()
    gone, delivery = OutputSink(closed), Delivery()
    delivery.add(gone, word(0))
    closed.close()
    with loop_in_a_thread() as loop:
        sink = OutputSink(loop)
        reading = asyncio.run_coroutine_threadsafe(read_all(sink), loop)
        deliver(delivery, [gone, sink], 20)
        assert reading.result(30).token_ids == list(range(20))


class ClosesUnderOurHands(asyncio.SelectorEventLoop):
    """Closes between the question whether it is closed and the post."""

    def call_soon_threadsafe(self, *args: Any, **options: Any) -> asyncio.Handle:  # type: ignore[override]
        self.close()
        return super().call_soon_threadsafe(*args, **options)


def test_a_loop_that_closes_at_that_moment_is_skipped_too() -> None:
    closing = ClosesUnderOurHands()
    with loop_in_a_thread() as loop:
        sinks = [OutputSink(closing), OutputSink(loop)]
        reading = asyncio.run_coroutine_threadsafe(read_all(sinks[1]), loop)
        deliver(Delivery(), sinks, 3)
        assert closing.is_closed()
        assert reading.result(30).token_ids == [0, 1, 2]


def test_a_closed_loop_is_let_go() -> None:
    """A service that outlives many loops (tests, threads that come and go) doesn't keep them."""
    delivery, loop = Delivery(), asyncio.new_event_loop()
    sink = OutputSink(loop)
    deliver(delivery, [sink], 1)
    loop.run_until_complete(read_all(sink))
    loop.close()
    gone = weakref.ref(loop)
    del loop, sink
    delivery.post()
    gc.collect()
    assert gone() is None


async def test_an_error_comes_after_the_text_before_it_and_stays() -> None:
    sink, delivery = OutputSink(asyncio.get_running_loop()), Delivery()
    delivery.add(sink, word(1))
    delivery.post()
    assert (await sink.get()).text == "1 "
    delivery.add(sink, word(2))
    delivery.add(sink, Delta(error=EngineDead("it died")))
    delivery.post()
    assert (await sink.get()).text == "2 "
    for _ in range(2):
        with pytest.raises(EngineDead, match="it died"):
            await sink.get()


async def test_an_error_reaches_a_reader_that_already_waits() -> None:
    sink, delivery = OutputSink(asyncio.get_running_loop()), Delivery()
    reading = asyncio.create_task(sink.get())
    await asyncio.sleep(0)
    delivery.add(sink, Delta(error=SequenceFailed()))
    delivery.post()
    with pytest.raises(SequenceFailed):
        await reading


async def test_a_cancelled_wait_loses_nothing() -> None:
    sink, delivery = OutputSink(asyncio.get_running_loop()), Delivery()
    reading = asyncio.create_task(sink.get())
    await asyncio.sleep(0)
    delivery.add(sink, word(1))
    delivery.post()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert (await sink.get()).text == "1 "
