from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tokennorm.data import ChatDataset, ChatEncoder, Conversation, Sample, check_max_length, terminal_progress
from tokennorm.errors import DataError


def chat(question: str, answer: str, source: str = "test") -> Conversation:
    return Conversation(
        messages=[{"role": "user", "content": question}, {"role": "assistant", "content": answer}], source=source
    )


def test_shift_labels_by_hand():
    sample = Sample(
        input_ids=torch.tensor([7, 8, 9, 10]), supervised=torch.tensor([True, False, True, True]), source="x"
    )
    # Nothing predicts the first token, the last position predicts nothing.
    assert sample.shift_labels().tolist() == [-100, 9, 10, -100]
    assert sample.num_supervised == 2
    one = Sample(input_ids=torch.tensor([7]), supervised=torch.tensor([True]), source="x")
    assert one.shift_labels().tolist() == [-100]
    assert one.num_supervised == 0


def test_truncation_keeps_the_head_and_counts_what_it_costs(make_tokenizer):
    tokenizer = make_tokenizer()
    conversations = [
        chat("hi", "Hello", "short"),
        chat("hi", "The quick brown fox jumps over the lazy dog " * 8, "long answer"),
        chat("The quick brown fox jumps over the lazy dog " * 8, "Hello", "long question"),
    ]
    whole = [ChatEncoder(tokenizer).encode(conversation) for conversation in conversations]
    limit = 80
    assert [len(encoded.input_ids) > limit for encoded in whole] == [False, True, True]
    calls = []
    dataset = ChatDataset.encode(
        conversations, tokenizer, max_length=limit, progress=lambda *call: calls.append(call)
    )
    assert [sample.source for sample in dataset] == ["short", "long answer"]
    assert dataset[1].input_ids.tolist() == whole[1].input_ids[:limit]
    assert dataset[1].supervised.tolist() == whole[1].supervised[:limit]
    assert calls[0] == (0, 3)
    assert calls[-1] == (3, 3)

    stats = dataset.statistics
    kept = [sum(whole[0].supervised), sum(whole[1].supervised[:limit])]
    assert (stats.num_conversations, stats.num_samples, stats.num_dropped, stats.num_truncated) == (3, 2, 1, 1)
    assert stats.supervised_tokens == sum(kept) == sum(dataset.supervised_lengths)
    assert stats.total_tokens == len(whole[0].input_ids) + limit == sum(dataset.lengths)
    assert stats.lost_supervised_tokens == sum(sum(encoded.supervised) for encoded in whole) - sum(kept)
    first, second = stats.warnings()
    assert first.startswith("1 of 3 conversations are dropped")
    assert second.startswith("1 of 3 conversations are cut")
    assert ChatDataset.encode(conversations, tokenizer, max_length=1000).statistics.warnings() == []


def test_statistics_warn_of_missing_ends_and_special_text(make_tokenizer):
    tokenizer = make_tokenizer("end-of-chat-only")
    two = Conversation(messages=[*chat("a", "b").messages, *chat("c", "d").messages], source="two")
    stats = ChatDataset.encode([two, chat("what is </s>?", "x")], tokenizer, max_length=100).statistics
    assert (stats.num_without_end, stats.num_special_text) == (1, 1)
    assert [warning[:1] for warning in stats.warnings()] == ["1", "1"]


def test_nothing_supervised_is_an_error(make_tokenizer):
    with pytest.raises(DataError, match=r"no supervised token in the whole set \(0 samples\)"):
        ChatDataset.encode([chat("hi", "Hello")], make_tokenizer(), max_length=5)
    with pytest.raises(DataError, match="no supervised token"):
        ChatDataset([])
    with pytest.raises(DataError, match="no supervised token"):
        # The only supervised token is the first one, which nothing predicts.
        ChatDataset([Sample(input_ids=torch.arange(3), supervised=torch.tensor([1, 0, 0]).bool(), source="x")])
    with pytest.raises(DataError, match="max_length is 1 tokens"):
        ChatDataset.encode([chat("hi", "Hello")], make_tokenizer(), max_length=1)


def test_an_error_names_the_conversation(make_tokenizer):
    with pytest.raises(DataError, match=r"data.jsonl:7: .*refuses the roles"):
        ChatDataset.encode(
            [
                chat("a", "b"),
                Conversation(
                    messages=[{"role": "tool", "content": "x"}, *chat("a", "b").messages], source="data.jsonl:7"
                ),
            ],
            make_tokenizer("mistral"),
            max_length=100,
        )


def tiny_model(vocabulary: int, positions: int) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, n_positions=positions, n_embd=8, n_layer=1, n_head=1))


def test_fitting_the_model(make_tokenizer):
    tokenizer = make_tokenizer()
    dataset = ChatDataset.encode([chat("hi", "Hello"), chat("é", "x" * 50, "long")], tokenizer, max_length=200)
    longest = max(dataset.lengths)
    dataset.check_fits(tiny_model(len(tokenizer), longest))
    with pytest.raises(DataError, match=f"max_length is {longest} tokens, the model has {longest - 1} positions"):
        dataset.check_fits(tiny_model(len(tokenizer), longest - 1))
    largest = max(int(sample.input_ids.max()) for sample in dataset)
    dataset.check_fits(tiny_model(largest + 1, longest))
    with pytest.raises(DataError, match=f"token id {largest}, but the model's embedding has {largest} rows"):
        dataset.check_fits(tiny_model(largest, longest))


def test_max_length_is_checked_at_configuration():
    config = GPT2Config(n_positions=64)
    check_max_length(64, config)
    with pytest.raises(DataError, match="max_length is 65 tokens, the model has 64 positions"):
        check_max_length(65, config)
    check_max_length(10**9, object())  # no limit declared


def test_take_and_select():
    samples = [
        Sample(input_ids=torch.arange(i + 2), supervised=torch.ones(i + 2, dtype=torch.bool), source=str(i))
        for i in range(20)
    ]
    dataset = ChatDataset(samples)
    part = dataset.take(min_supervised_tokens=60)
    assert 60 <= part.statistics.supervised_tokens < 60 + 20
    assert [sample.source for sample in part] == [
        sample.source for sample in dataset.take(min_supervised_tokens=60)
    ]
    assert [sample.source for sample in part] != [
        sample.source for sample in dataset.take(min_supervised_tokens=60, seed=1)
    ]
    assert [sample.source for sample in dataset.select([3, 1])] == ["3", "1"]
    with pytest.raises(DataError, match="1,000 supervised tokens are asked for, the set holds 210"):
        dataset.take(min_supervised_tokens=1000)
    assert dataset.describe().startswith(
        "20 samples, 210 supervised of 230 tokens; supervised per sample: median 10"
    )
    assert [len(sample) for sample in dataset[2:4]] == [4, 5]


def test_no_bar_where_there_is_no_terminal(capsys):
    with terminal_progress("encoding") as progress:
        assert progress is None
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with terminal_progress("encoding", enabled=False) as progress:
        assert progress is None
    with terminal_progress("encoding") as progress:
        assert progress is not None
        progress(1, 2)
        progress(2, 2)
    assert "encoding" in capsys.readouterr().err
