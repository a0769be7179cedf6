"""The peer of the update benchmark: torch, whole logits, gradient checkpointing, AdamW.

Run as a program: `python -m svrl_jax.bench.train_peer FOLDER`, a Hugging Face folder with the
workload's arrays beside the weights. Prints one line of JSON. Needs the extra [bench]; torch is
imported inside functions only.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np

from svrl_jax.bench.rollout_peer import load_peer

STEPS = 3


def main(folder: str) -> dict:
    """Seconds of the quickest step but the first, peak GiB, the first step's loss and norm."""
    torch, model = load_peer(folder)
    model.train()
    model.gradient_checkpointing_enable()
    arrays = np.load(os.path.join(folder, "arrays.npz"))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids = torch.from_numpy(arrays["ids"])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.from_numpy(arrays["pixel_values"]).flatten(0, 1),
        "image_grid_thw": torch.from_numpy(arrays["grid"]),
        "mm_token_type_ids": (ids == model.config.image_token_id).int(),
    }
    mask = torch.from_numpy(arrays["mask"])[:, 1:].float()
    gain = torch.from_numpy(arrays["advantages"])[:, None]
    before = None
    seconds, first = [], {}
    for _ in range(STEPS):
        start = time.perf_counter()
        logits = model(**inputs).logits[:, :-1]
        chosen = torch.gather(logits, 2, ids[:, 1:, None])[..., 0]
        logps = chosen - torch.logsumexp(logits, dim=-1)
        before = logps.detach() if before is None else before
        ratio = torch.exp(logps - before)
        clipped = ratio.clamp(0.8, 1.2)
        loss = -(torch.minimum(ratio * gain, clipped * gain) * mask).sum() / mask.sum()
        loss.backward()
        if not first:
            squares = sum(float((p.grad**2).sum()) for p in model.parameters())
            first = {"loss": loss.item(), "grad_norm": squares**0.5}
        optimiser.step()
        optimiser.zero_grad()
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds[1:]), "gib": _peak_gib()} | first


def _peak_gib() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
