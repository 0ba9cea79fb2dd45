"""Small tokenizers of every decoding kind, made in milliseconds with the `tokenizers` library alone."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = "The quick brown fox jumps over the lazy dog. Don't you know? 0123456789 émigré 日本語 🙂\n    four\n"
PAD = "<pad>"
BAR = "|"
SPECIALS = (PAD, "<bos>", "<eos>")


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have: any bytes can come out, whole characters only by chance."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(name, special=True) for name in SPECIALS],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 8, trainer)
    tokenizer.add_tokens(["<tool call>", "naïve"])  # a space is outside of the byte alphabet; ï alone is a broken byte
    return tokenizer


def byte_level_lossy() -> Tokenizer:
    """Like SmolLM2's, its vocabulary lacks some control characters, which are dropped without a word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = [character for character in pre_tokenizers.ByteLevel.alphabet() if character not in "\u0104\u0106"]
    tokenizer.train_from_iterator([""], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def byte_level_composing() -> Tokenizer:
    """A token of 12 bytes that stands for 16 characters of a text which isn't composed yet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["\u1f82" * 4] * 50, trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def byte_level_swallowing() -> Tokenizer:
    """As Phi-3's added tokens: one takes all the blanks behind it."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, rstrip=True)])
    return tokenizer


def byte_level_with_bos() -> Tokenizer:
    tokenizer = byte_level()
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos)]
    )
    return tokenizer


def sentencepiece(*, strip: int = 1, fuse: bool = True) -> Tokenizer:
    """As Llama 2 has: ▁ for a space, and byte tokens for characters without a token."""
    words = ["▁", "▁a", "▁the", "a", "b", "c", "x", "e", "▁▁", "▁▁▁▁", "\n", "é", "\ufffd", "▁x", "hello", "。", "<0x4>"]
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token=PAD, byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback()]
    if fuse:
        steps.append(decoders.Fuse())
        if strip:
            steps.append(decoders.Strip(" ", strip, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos)]
    )
    return tokenizer


def wordpiece() -> Tokenizer:
    tokens = [*SPECIALS, "the", "##s", "##ing", "run", ".", ",", "'", "n't", "don", "is", "##", "a", "'s", "日", "🙂"]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    return tokenizer


def with_decoder(decoder: decoders.Decoder | None) -> Tokenizer:
    """Awkward tokens under any other decoder."""
    words = ["▁", "▁a", "a</w>", "b", "b</w>", "▁▁", "x", "the</w>", "▁the", "|", "##s", "<0x41>", " ", "é", "c", "</w>"]
    tokens = [*SPECIALS, *words]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def every_kind() -> dict[str, Tokenizer]:
    return {
        "byte-level": byte_level(),
        "byte-level in a sequence": _set(byte_level(), decoders.Sequence([decoders.ByteLevel()])),
        "byte-level, then stripped": _set(byte_level(), decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])),
        "byte-level, lossy": byte_level_lossy(),
        "byte-level, composing": byte_level_composing(),
        "byte-level, swallowing": byte_level_swallowing(),
        "llama": sentencepiece(),
        "gemma": sentencepiece(strip=0),
        "llama, strips three": sentencepiece(strip=3),
        "byte fallback without fuse": sentencepiece(fuse=False),
        "wordpiece": wordpiece(),
        "wordpiece without clean-up": _set(wordpiece(), decoders.WordPiece(cleanup=False)),
        "metaspace": with_decoder(decoders.Metaspace()),
        "metaspace, never first": with_decoder(decoders.Metaspace(prepend_scheme="never")),
        "suffix": with_decoder(decoders.BPEDecoder()),
        "ctc": with_decoder(decoders.CTC(PAD, BAR)),
        "replaced across tokens": with_decoder(decoders.Sequence([decoders.Fuse(), decoders.Replace("aa", "b")])),
        "none": with_decoder(None),
    }


def _set(tokenizer: Tokenizer, decoder: decoders.Decoder) -> Tokenizer:
    tokenizer.decoder = decoder
    return tokenizer
