"""Small tokenizers of both families, trained on the spot, and models with random weights that have them.

As a script, it writes such a model, of SentencePiece's family, into the folder that it is given.
"""

import json
import pathlib
import sys

import tiny_models
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from fly_jax.decode.decoder_config import DecoderConfig

CORPUS = [
    "The museum opened a new wing on Monday, and the wing holds forty paintings by local artists.",
    "Visitors can enter the old museum for free on the first Sunday of each month, said the director.",
    "She thanked the city and the three families who gave most of the money for the new library.",
    "The river, which was 123 metres wide in 1987, is now 45 metres wide; nobody knows why that is.",
    "We walked for hours over the hills, and then the rain began: the café was closed, the road wet.",
    "def add(first, second):\n    return first + second  # the sum of two numbers, 1 + 2 = 3",
]


def byte_level(vocab_size=420, special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>")):
    """Byte-level BPE: a space is Ġ, whatever is not ASCII is spelt in bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _trained(tokenizer, trainers.BpeTrainer, vocab_size, special_tokens, initial_alphabet=alphabet)


def sentencepiece_bpe(vocab_size=300, special_tokens=("<unk>", "<s>", "</s>")):
    """As Llama 2's: a space is ▁ and one stands before every text, so that " a" begins with two of them."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = _trained(tokenizer, trainers.BpeTrainer, vocab_size, special_tokens)
    # No token goes over a space, though texts are not cut there any more.
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def sentencepiece_unigram(vocab_size=160, special_tokens=("<pad>", "</s>", "<unk>")):
    """As T5's: a space is ▁, words are cut at it."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _trained(tokenizer, trainers.UnigramTrainer, vocab_size, special_tokens, unk_token="<unk>")


def words(vocabulary):
    """Whole words, without any space marker."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _trained(tokenizer, trainer, vocab_size, special_tokens, **options):
    special = [AddedToken(token, special=True, normalized=False) for token in special_tokens]
    tokenizer.train_from_iterator(
        CORPUS, trainer(vocab_size=vocab_size, special_tokens=special, show_progress=False, **options)
    )
    return tokenizer


def write_model(folder, tokenizer, seed, **special_tokens):
    """A folder that `load_model` reads; the model has three columns more than the tokenizer has tokens."""
    config_json = {**tiny_models.CONFIG_JSON, "vocab_size": tokenizer.get_vocab_size() + 3}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_json))
    save_file(tiny_models.random_tensors(DecoderConfig.from_hf(config_json), seed), folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(special_tokens))
    return folder


if __name__ == "__main__":
    write_model(pathlib.Path(sys.argv[1]), sentencepiece_bpe(), 0, eos_token="</s>", unk_token="<unk>")
