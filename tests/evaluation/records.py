"""Records of an evaluation, as `fly_jax.evaluation.run` makes them, with texts of one's own choice."""

from fly_jax.evaluation.tasks import Task

MODES = ("target-only", "standard", "fly")


def tasks(count):
    return [
        Task(
            name=f"task {i}",
            family="even" if i % 2 == 0 else "odd",
            messages=({"role": "user", "content": f"prompt {i}"},),
            references=(f"answer {i}",),
            scorer="exact",
            max_tokens=None,
            split="report",
        )
        for i in range(count)
    ]


def text(i, score, token_ids=(1, 2, 3, 4), num_deferred=0, num_cycles=2):
    return {
        "task": f"task {i}",
        "score": float(score),
        "text": "",
        "token_ids": list(token_ids),
        "num_deferred": num_deferred,
        "num_cycles": num_cycles,
        "finish_reason": "stop",
    }


def part(texts, *, decode_seconds=1.0, prefill_seconds=0.5, drafted=(), accepted=(), num_tokens=None):
    return {
        "prefill_seconds": prefill_seconds,
        "decode_seconds": decode_seconds,
        "num_tokens": sum(len(each["token_ids"]) for each in texts) if num_tokens is None else num_tokens,
        "num_cycles": sum(each["num_cycles"] for each in texts),
        "drafted_per_position": list(drafted),
        "accepted_per_position": list(accepted),
        "deferred_per_position": [0] * len(drafted),
        "texts": list(texts),
    }


def record(batch_size, seed, first, **parts):
    names = dict(zip(("target_only", "standard", "fly"), MODES, strict=True))
    return {"unit": [batch_size, seed, first], "modes": {names[name]: each for name, each in parts.items()}}


def one_by_one(scores, *, fly=None):
    """Batches of one: each task solved or not by all modes alike, or by FLy as `fly` says; FLy is twice as fast."""
    result = []
    for i, (ours, theirs) in enumerate(zip(scores, scores if fly is None else fly, strict=True)):
        drafts = {"drafted": (2, 2), "accepted": (2, 1)}
        result.append(
            record(
                1,
                0,
                i,
                target_only=part([text(i, ours, num_cycles=4)], decode_seconds=4.0),
                standard=part([text(i, ours)], decode_seconds=2.0 + 0.1 * (i % 3), **drafts),
                fly=part([text(i, theirs, (1, 2, 3, 5), 1)], decode_seconds=1.0, **drafts),
            )
        )
    return result
