"""The default model as Hugging Face folders: the target, and a draft with the same vocabulary."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fly_jax.decode.checkpoints.default import default_model_path

# Without these layers the model still answers well enough that a good part of its drafts is accepted.
LEFT_OUT = (20, 22, 24, 25)


def target_folder(cache_dir: str | Path) -> Path:
    """SmolLM2-135M-Instruct in float32, with tokenizer and chat template, converted when it is not there yet."""
    return _folder(Path(cache_dir) / "smollm2-135m-instruct", _write_target)


def draft_folder(cache_dir: str | Path) -> Path:
    """The target without some of its layers, a draft model for it."""
    target = target_folder(cache_dir)
    return _folder(Path(cache_dir) / "smollm2-135m-instruct-draft", lambda folder: _write_draft(target, folder))


def chat_tokens(folder: Path, messages: list[str]) -> list[list[int]]:
    """Each user message as the token ids of a chat that waits for the answer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, return_dict=False
        )
        for message in messages
    ]


def detours(folder: Path, prompts: list[list[int]], length: int, every: int, first: int = 2) -> list[list[int]]:
    """Greedy answers in which the tokens at `first`, `first + every`, ... are the second most probable ones.

    As drafts they are rejected there, while the target agrees with all that follows a rejected token. With
    `every = num_speculative_tokens + 1` the rejections keep their place in the drafts while FLy accepts them.
    """
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [_detour(model, prompt, length, every, first) for prompt in prompts]


@torch.inference_mode()
def mean_logprob(folder: Path, prompts: list[list[int]], answers: list[list[int]]) -> float:
    """The target's own mean log-probability, in nats, of the tokens of the answers."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(dim=1)[torch.arange(len(answer)), answer])
    return float(torch.cat(found).mean())


@torch.inference_mode()
def _detour(model: LlamaForCausalLM, prompt: list[int], length: int, every: int, first: int) -> list[int]:
    answer, cache, unread = [], None, prompt
    for i in range(length):
        output = model(torch.tensor([unread]), past_key_values=cache)
        best = output.logits[0, -1].topk(2).indices.tolist()
        unread, cache = [best[i >= first and (i - first) % every == 0]], output.past_key_values
        answer += unread
    return answer


def _folder(path: Path, write: Callable[[Path], None]) -> Path:
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".write-") as scratch:
        whole = Path(scratch) / path.name
        write(whole)
        try:
            os.replace(whole, path)
        except OSError:
            if not path.is_dir():  # else another process was faster
                raise
    return path


def _write_target(folder: Path) -> None:
    gguf = default_model_path()
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    _save(AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32), folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def _write_draft(target: Path, folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    kept = [i for i in range(model.config.num_hidden_layers) if i not in LEFT_OUT]
    model.model.layers = torch.nn.ModuleList(model.model.layers[i] for i in kept)
    model.config.num_hidden_layers = len(kept)
    _save(model, folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)


def _save(model: LlamaForCausalLM, folder: Path) -> None:
    # A model loaded from GGUF counts as quantised and cannot be saved: its weights are copied into a fresh one.
    given = model.config.to_dict()
    given.pop("quantization_config", None)
    config = LlamaConfig(**given)
    config.dtype = torch.float32
    fresh = LlamaForCausalLM(config)
    fresh.load_state_dict(model.state_dict())
    fresh.generation_config = model.generation_config
    fresh.save_pretrained(folder)
