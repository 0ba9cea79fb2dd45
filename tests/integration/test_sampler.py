"""What each sampling parameter promises, against formulas written here in numpy and against transformers."""

import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from llm import sampling_filters
from llm.exceptions import SequenceFailed
from llm.messages import NewSequence, TokenLogprob
from llm.sampler import Drawn, Sampler
from llm.sequence import SamplingParams

EOS = 2
VOCAB = 997  # no multiple of any vector width
CHI_SQUARE_3_DEGREES = 16.27  # exceeded by chance once in a thousand


def new_sequence(
    seq_id: int = 0,
    prompt: Sequence[int] = (5, 6, 7),
    output: Sequence[int] = (),
    *,
    seed: int = 0,
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> NewSequence:
    tokens = (*prompt, *output)
    return NewSequence(seq_id, "request", tokens, len(prompt), 0, (), SamplingParams(**params), seed, bad_word_ids)


def sampler_of(*sequences: NewSequence, vocab: int = VOCAB) -> Sampler:
    sampler = Sampler(vocab, (EOS,), torch.device("cpu"))
    for sequence in sequences:
        sampler.add(sequence)
    return sampler


def generate(sequence: NewSequence, steps: Sequence[torch.Tensor]) -> list[int]:
    """The tokens of one sequence alone; `steps`: a row of logits, [vocab], for each."""
    sampler = sampler_of(sequence, vocab=len(steps[0]))
    return [token_of(sampler.sample([sequence.seq_id], row[None])[0]) for row in steps]


def token_of(drawn: Drawn) -> int:
    assert drawn.error is None
    assert drawn.token_id is not None
    return drawn.token_id


def random_rows(count: int, *, vocab: int = VOCAB, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * scale


CROWD = (
    new_sequence(0),
    new_sequence(1, temperature=1.0, seed=3),
    new_sequence(2, temperature=0.7, top_k=40, seed=4, logprobs=5),
    new_sequence(3, temperature=1.3, top_p=0.9, seed=5),
    new_sequence(4, logprobs=0),
    new_sequence(5, temperature=1.0, min_p=0.02, seed=6, repetition_penalty=1.3),
    new_sequence(6, temperature=1.0, typical_p=0.8, seed=7, presence_penalty=1.0, frequency_penalty=0.5),
    new_sequence(7, logit_bias=((9, 4.0), (10, -100.0)), min_tokens=3, bad_word_ids=((11,), (7, 12))),
    new_sequence(8),
    new_sequence(9, temperature=1.0, top_k=100, top_p=0.95, min_p=0.01, typical_p=0.9, seed=2**63 - 1, logprobs=20),
)


class TestSameRequestSameAnswer:
    def test_a_row_is_bit_equal_alone_and_in_any_crowd(self) -> None:
        steps = [random_rows(len(CROWD), seed=step) for step in range(6)]
        lone = [sampler_of(sequence) for sequence in CROWD]
        alone = [[lone[i].sample([i], rows[i : i + 1])[0] for i in range(len(CROWD))] for rows in steps]
        for order in (list(range(10)), list(range(9, -1, -1)), [3, 1, 7], [0, 8], [5]):
            together = sampler_of(*CROWD)
            for rows, expected in zip(steps, alone, strict=True):
                assert together.sample(order, rows[order]) == [expected[i] for i in order]

    @pytest.mark.parametrize("sequence", CROWD, ids=lambda sequence: str(sequence.seq_id))
    def test_a_sequence_taken_up_again_goes_on_as_if_nothing_had_happened(self, sequence: NewSequence) -> None:
        rows = random_rows(12)
        undisturbed = generate(sequence, list(rows))
        for cut in (1, 5, 11):
            sampler = sampler_of(sequence)
            known = [token_of(sampler.sample([sequence.seq_id], rows[i : i + 1])[0]) for i in range(cut)]
            sampler.forget(sequence.seq_id)
            tokens = (*sequence.token_ids, *known)
            sampler.add(
                NewSequence(
                    sequence.seq_id,
                    "request",
                    tokens,
                    sequence.num_prompt_tokens,
                    0,
                    (),
                    sequence.params,
                    sequence.seed,
                    sequence.bad_word_ids,
                )
            )
            rest = [token_of(sampler.sample([sequence.seq_id], rows[i : i + 1])[0]) for i in range(cut, 12)]
            assert known + rest == undisturbed

    def test_a_seed_repeats_and_another_differs(self) -> None:
        rows = list(random_rows(20, scale=0.5))
        answers = [generate(new_sequence(temperature=1.0, seed=seed), rows) for seed in (7, 7, 8, 0, 2**63 - 1)]
        assert answers[0] == answers[1]
        assert len({tuple(answer) for answer in answers}) == 4

    def test_the_draw_depends_on_the_place_in_the_sequence_and_not_on_where_the_prompt_ends(self) -> None:
        row = random_rows(1, scale=0.3)[0]
        one, other = (
            [generate(new_sequence(prompt=prompt, output=output, temperature=1.0, seed=seed), [row])[0] for seed in range(9)]
            for prompt, output in (([5, 6, 7], []), ([5], [6, 7]))
        )
        assert one == other

    def test_the_callers_logits_are_left_alone(self) -> None:
        rows = random_rows(len(CROWD))
        kept = rows.clone()
        sampler_of(*CROWD).sample(range(len(CROWD)), rows)
        assert torch.equal(rows, kept)

    def test_nothing_is_kept_of_a_forgotten_sequence(self) -> None:
        sampler, rows = sampler_of(), random_rows(1)

        def live_and_die(seq_id: int) -> None:
            sampler.add(new_sequence(seq_id, range(200), temperature=1.0, top_k=5, repetition_penalty=1.2))
            sampler.sample([seq_id], rows)
            sampler.forget(seq_id)

        live_and_die(0)
        tracemalloc.start()
        for seq_id in range(1, 200):
            live_and_die(seq_id)
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert grown < 50_000
        sampler.forget(12345)


class TestGreedy:
    @pytest.mark.parametrize(
        "params",
        [
            {"temperature": 0.0},
            {"temperature": 0.0, "top_p": 0.0},
            {"temperature": 0.0, "top_p": 1e-9, "top_k": 7, "min_p": 0.3, "typical_p": 0.2},
            {"temperature": 1.0, "top_p": 0.0},
            {"temperature": 1.0, "top_p": 1e-9},
            {"temperature": 1.0, "top_k": 1},
            {"temperature": 1.0, "min_p": 1.0},
            {"temperature": 5e-324},
            {"temperature": 0.0, "logprobs": 1},
        ],
    )
    def test_these_parameters_give_the_likeliest_token_and_of_equal_ones_the_lowest(self, params: dict[str, Any]) -> None:
        rows = random_rows(30)
        rows[:, 500] = rows[:, 40] = rows.max() + torch.rand(30)
        if params["temperature"] == 5e-324:  # of equal ones any
            rows[:, 500] -= 1
        assert generate(new_sequence(**params), list(rows)) == [40] * 30

    @pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": -1}, {"top_k": 10**9}, {"top_p": 1.0}, {"min_p": 0.0}])
    def test_these_parameters_filter_nothing(self, off: dict[str, Any]) -> None:
        rows = list(random_rows(40, scale=0.3))
        assert generate(new_sequence(temperature=1.0, **off), rows) == generate(new_sequence(temperature=1.0), rows)


class TestPenalties:
    def test_the_prompt_counts_in_neither_presence_nor_frequency(self) -> None:
        params: dict[str, Any] = {"logit_bias": ((33, 100.0),), "frequency_penalty": 2.0, "presence_penalty": 2.0}
        assert generate(new_sequence(prompt=[33] * 60, **params), [random_rows(1)[0]]) == [33]

    def test_presence_and_frequency_follow_the_formula(self) -> None:
        row = random_rows(1, scale=0.5)[0]
        prompt = row.topk(4).indices.tolist()
        tokens = generate(new_sequence(prompt=prompt, presence_penalty=0.4, frequency_penalty=0.3), [row] * 40)
        logits, counts = row.double().numpy(), np.zeros(VOCAB)
        for token in tokens:
            assert token == int((logits - counts * 0.3 - (counts > 0) * 0.4).argmax())
            counts[token] += 1
        assert counts.max() > 1

    @pytest.mark.parametrize("penalty", [1.3, 0.7])
    def test_repetition_counts_prompt_and_output_as_transformers_does(self, penalty: float) -> None:
        rows = random_rows(20)
        prompt = rows[:5].argmax(dim=-1).tolist()
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        tokens = list(prompt)
        for row in rows:
            tokens.append(int(processor(torch.tensor([tokens]), row[None].clone()).argmax()))
        assert generate(new_sequence(prompt=prompt, repetition_penalty=penalty), list(rows)) == tokens[5:]
        assert tokens[5:10] != prompt or penalty < 1

    def test_an_extreme_repetition_penalty_is_no_failure(self) -> None:
        token = generate(new_sequence(prompt=range(VOCAB), repetition_penalty=5e-324), [random_rows(1)[0]])[0]
        assert random_rows(1)[0, token] > 0


class TestBansAndBias:
    def test_a_bias_is_added(self) -> None:
        row = torch.zeros(VOCAB)
        row[3] = 5
        assert generate(new_sequence(logit_bias=((VOCAB - 1, 5.5), (3, 0.25))), [row]) == [VOCAB - 1]
        assert generate(new_sequence(logit_bias=((VOCAB - 1, 5.5), (3, 0.75))), [row]) == [3]

    def test_minus_100_keeps_the_greedy_token_away(self) -> None:
        row = random_rows(1)[0]
        best = int(row.argmax())
        assert best not in generate(new_sequence(logit_bias=((best, -100.0),)), [row] * 50)
        assert best not in generate(new_sequence(temperature=1.0, logit_bias=((best, -100.0),)), [row] * 50)

    def test_a_word_of_one_token_never_comes(self) -> None:
        row = random_rows(1)[0]
        best, second = row.topk(2).indices.tolist()
        assert generate(new_sequence(bad_word_ids=((best,),)), [row] * 3) == [second] * 3
        assert best not in generate(new_sequence(temperature=2.0, bad_word_ids=((best,),)), [row] * 50)

    def test_a_word_of_several_tokens_loses_its_last_one_only_where_the_others_stand_before(self) -> None:
        row = random_rows(1)[0]
        best, second = row.topk(2).indices.tolist()
        assert generate(new_sequence(prompt=[5], bad_word_ids=((8, 5, best),)), [row]) == [best]
        assert generate(new_sequence(prompt=[8, 5], bad_word_ids=((8, 5, best),)), [row] * 2) == [second, best]
        assert generate(new_sequence(prompt=[8], output=[5], bad_word_ids=((8, 5, best),)), [row]) == [second]
        assert generate(new_sequence(bad_word_ids=((best, best),)), [row] * 4) == [best, second] * 2

    def test_a_banned_token_stays_banned_under_every_penalty(self) -> None:
        row = random_rows(1)[0]
        best = int(row.argmax())
        sequence = new_sequence(prompt=[best], bad_word_ids=((best,),), repetition_penalty=0.01, presence_penalty=-2.0)
        assert best not in generate(sequence, [row] * 5)

    def test_min_tokens_keeps_end_and_stop_tokens_away_for_so_long(self) -> None:
        row = random_rows(1)[0]
        row[EOS], row[20] = 30, 29
        params: dict[str, Any] = {"min_tokens": 4, "stop_token_ids": (20,)}
        assert {EOS, 20}.isdisjoint(generate(new_sequence(**params), [row] * 4))
        assert generate(new_sequence(**params), [row] * 6)[4:] == [EOS, EOS]
        assert {EOS, 20}.isdisjoint(generate(new_sequence(temperature=1.0, **params), [row] * 4))
        assert generate(new_sequence(output=[9, 9, 9], **params), [row] * 2)[1] == EOS

    def test_a_request_that_bans_everything_fails_alone(self) -> None:
        rows = random_rows(2, vocab=4)
        hopeless = new_sequence(0, (0,), min_tokens=2, bad_word_ids=((0,), (1,), (3,)))
        drawn = sampler_of(hopeless, new_sequence(1, (0,)), vocab=4).sample([0, 1], rows)
        assert drawn[0].error is not None
        assert "bad_words" in drawn[0].error
        assert token_of(drawn[1]) == int(rows[1].argmax())

    def test_ids_that_the_model_has_no_logits_of_are_no_failure(self) -> None:
        sampler = Sampler(10, (2, 10**6), torch.device("cpu"))
        sampler.add(new_sequence(min_tokens=1, bad_word_ids=((VOCAB,), (7, VOCAB))))
        assert sampler.sample([0], torch.arange(10.0)[None])[0].token_id == 9


def kept_by(warper: LogitsProcessor, row: torch.Tensor) -> NDArray[np.int64]:
    scores = warper(torch.zeros(1, 1, dtype=torch.long), row[None].double())
    return np.flatnonzero(np.isfinite(scores[0].numpy()))


def log_weights(row: torch.Tensor) -> NDArray[np.float64]:
    values: NDArray[np.float64] = row.double().numpy()
    values -= values.max()
    return values


class TestFilters:
    @pytest.mark.parametrize("scale", [0.3, 2.0, 8.0])
    @pytest.mark.parametrize("p", [0.001, 0.3, 0.9, 0.999])
    def test_transformers_keeps_the_same_tokens(self, p: float, scale: float) -> None:
        for seed in range(4):
            row = random_rows(1, vocab=20_011, scale=scale, seed=seed)[0]
            values = log_weights(row)
            k = max(1, int(p * 1000))
            assert np.array_equal(sampling_filters.top_k(values, k), kept_by(TopKLogitsWarper(k), row))
            assert np.array_equal(sampling_filters.top_p(values, p), kept_by(TopPLogitsWarper(p), row))
            assert np.array_equal(sampling_filters.min_p(values, p), kept_by(MinPLogitsWarper(p), row))
            assert np.array_equal(sampling_filters.typical_p(values, p), kept_by(TypicalLogitsWarper(p), row))

    def test_of_equal_tokens_the_lower_ids_come_first(self) -> None:
        values = log_weights(torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, -1.0]))
        assert sampling_filters.top_k(values, 3).tolist() == [1, 2, 3]
        assert sampling_filters.top_p(values, 0.3).tolist() == [1, 2]
        assert sampling_filters.typical_p(values, 0.3).tolist() == [1, 2]
        assert sampling_filters.best(values, 2).tolist() == [1, 2]
        assert sampling_filters.top_p(np.zeros(40_000), 0.25).tolist() == list(range(10_000))
        assert sampling_filters.typical_p(np.zeros(40_000), 0.25).tolist() == list(range(10_000))

    @pytest.mark.parametrize("p", [1e-9, 1 - 2.0**-53])
    def test_at_least_one_token_survives_and_at_most_all(self, p: float) -> None:
        for scale in (1e-3, 1.0, 1e3):
            values = log_weights(random_rows(1, scale=scale)[0])
            for name in ("top_p", "min_p", "typical_p"):
                kept = getattr(sampling_filters, name)(values, p)
                assert 1 <= len(kept) <= VOCAB
                assert np.array_equal(kept, np.unique(kept))

    def test_a_later_filter_sees_what_the_earlier_left(self) -> None:
        """The best token has 0.4 of the whole, short of 0.5, but 0.57 of what the two best have together."""
        row = torch.tensor([0.4, 0.15, 0.1, 0.05, 0.3]).log()
        params: dict[str, Any] = {"temperature": 1.0, "top_p": 0.5}
        assert set(generate(new_sequence(**params), [row] * 100)) == {0, 4}
        assert set(generate(new_sequence(top_k=2, **params), [row] * 100)) == {0}
        assert set(generate(new_sequence(temperature=1.0, top_p=0.71), [row] * 200)) == {0, 4, 1}
        assert set(generate(new_sequence(temperature=0.5, top_p=0.71), [row] * 200)) == {0, 4}


class TestDistribution:
    def test_temperature_shapes_what_is_drawn(self) -> None:
        row = torch.tensor([2.0, 1.0, 0.5, -1.0])
        expected = 4000 * torch.softmax(row.double() / 0.7, dim=0).numpy()
        drawn = np.bincount(generate(new_sequence(temperature=0.7, seed=1), [row] * 4000), minlength=4)
        assert ((drawn - expected) ** 2 / expected).sum() < CHI_SQUARE_3_DEGREES

    @pytest.mark.parametrize(
        ("params", "chances"),
        [
            ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
            ({"top_p": 0.65}, [4 / 7, 3 / 7, 0, 0]),
            ({"min_p": 0.45}, [4 / 9, 3 / 9, 2 / 9, 0]),
            ({}, [0.4, 0.3, 0.2, 0.1]),
        ],
    )
    def test_the_kept_tokens_share_the_probability(self, params: dict[str, Any], chances: list[float]) -> None:
        row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
        drawn = np.bincount(generate(new_sequence(temperature=1.0, seed=2, **params), [row] * 3000), minlength=4)
        expected = 3000 * np.array(chances)
        kept = expected > 0
        assert not drawn[~kept].any()
        assert ((drawn - expected)[kept] ** 2 / expected[kept]).sum() < CHI_SQUARE_3_DEGREES


class TestLogprobs:
    def test_they_are_of_the_raw_logits_whatever_the_parameters(self) -> None:
        row = random_rows(1)[0]
        raw = torch.log_softmax(row.double(), dim=-1)
        top = [int(i) for i in row.sort(descending=True, stable=True).indices[:3]]
        for params in ({}, {"temperature": 1.0, "top_k": 1}, {"logit_bias": ((top[0], -100.0),), "presence_penalty": 1.0}):
            drawn = sampler_of(new_sequence(logprobs=3, **params)).sample([0], row[None])[0]
            assert drawn.logprob is not None
            assert drawn.logprob.token_id == drawn.token_id
            assert drawn.logprob.logprob == pytest.approx(float(raw[token_of(drawn)]), abs=1e-9)
            assert [token for token, _ in drawn.logprob.top] == top
            assert [value for _, value in drawn.logprob.top] == pytest.approx(raw[top].tolist(), abs=1e-9)

    def test_they_come_only_where_asked_for_and_with_as_many_alternatives(self) -> None:
        row = torch.zeros(1, VOCAB)
        assert sampler_of(new_sequence()).sample([0], row)[0].logprob is None
        none = sampler_of(new_sequence(logprobs=0)).sample([0], row)[0].logprob
        assert none is not None
        assert none.logprob == pytest.approx(-np.log(VOCAB))
        assert none.top == ()
        many = sampler_of(new_sequence(logprobs=20)).sample([0], row)[0].logprob
        assert many is not None
        assert [token for token, _ in many.top] == list(range(20))

    def test_minus_infinity_is_written_as_a_number(self) -> None:
        row = torch.full((1, VOCAB), -torch.inf)
        row[0, 3], row[0, 4] = 0.0, -20_000.0
        drawn = sampler_of(new_sequence(logprobs=3)).sample([0], row)[0]
        assert drawn.logprob == TokenLogprob(3, 0.0, ((3, 0.0), (4, -9999.0), (0, -9999.0)))

    def test_of_the_prompt(self) -> None:
        rows = random_rows(5)
        tokens = [3, 996, 0, 17, 17]
        raw = torch.log_softmax(rows.double(), dim=-1)
        answer = sampler_of().prompt_logprobs(tokens, rows, 2)
        assert [entry.token_id for entry in answer] == tokens
        assert [entry.logprob for entry in answer] == pytest.approx([float(raw[i, t]) for i, t in enumerate(tokens)], abs=1e-9)
        assert [[t for t, _ in entry.top] for entry in answer] == rows.topk(2).indices.tolist()
        assert answer[1:2] == sampler_of().prompt_logprobs(tokens[1:2], rows[1:2], 2)
        with pytest.raises(SequenceFailed, match="no finite logits"):
            sampler_of().prompt_logprobs([1], torch.full((1, VOCAB), torch.nan), 0)


class TestBadLogits:
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    @pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"logprobs": 2}])
    def test_only_the_row_that_has_them_fails(self, bad: float, params: dict[str, Any]) -> None:
        rows = random_rows(3)
        rows[1, 5:] = bad
        if bad == -torch.inf:
            rows[1] = bad
        sequences = [new_sequence(i, **params) for i in range(3)]
        drawn = sampler_of(*sequences).sample([0, 1, 2], rows)
        assert drawn[1] == Drawn(None, None, "the model gave no finite logits")
        for i in (0, 2):
            assert drawn[i] == sampler_of(sequences[i]).sample([i], rows[i : i + 1])[0]
