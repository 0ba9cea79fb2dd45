"""What crosses the process boundary arrives as it was sent."""

import pickle

from llm.messages import RowResult, SequenceStep, TokenLogprob


def test_the_messages_with_a_pickled_form_of_their_own_arrive_whole() -> None:
    step = SequenceStep(7, 16, (3, 4))
    row = RowResult(7, 42, TokenLogprob(42, -0.5, ((42, -0.5),)), (TokenLogprob(1, -2.0),), "it failed")
    for message in (step, row, SequenceStep(8, 1), RowResult(8)):
        assert pickle.loads(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)) == message  # noqa: S301 - our own
