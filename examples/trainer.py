"""A Trainer whose states and activations are on storage, to the same bits. Run python examples/trainer.py [FOLDER]."""

import sys
import tempfile
from typing import Any

import torch

from nvme_ops.integrations.trainer import use_nvme

texts = [{"input_ids": ids, "labels": ids} for ids in torch.arange(32 * 128).view(32, 128) % 250]


def main(folder: str) -> None:
    import transformers

    transformers.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        vocab_size=250, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )

    def trainer(name: str) -> Any:
        torch.manual_seed(7)
        arguments = transformers.TrainingArguments(
            f"{folder}/{name}", optim="adamw_torch", learning_rate=1e-3, weight_decay=0.1, warmup_steps=1, max_steps=2,
            save_steps=1, logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        made = transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=texts)
        made.remove_callback(transformers.PrinterCallback)
        return made

    plain, ours, resumed = trainer("plain"), trainer("ours"), trainer("resumed")
    expected = plain.train().training_loss
    use_nvme(ours, folder, optimizer_budget="4M", activations_budget="4M")
    loss = ours.train().training_loss
    print(f"loss {loss:.6f}: {'equal' if loss == expected else 'DIFFERENT'}")
    use_nvme(resumed, folder, optimizer_budget="4M", activations_budget="4M")
    resumed.train(resume_from_checkpoint=f"{folder}/ours/checkpoint-1")
    pairs = zip(resumed.model.parameters(), plain.model.parameters(), strict=True)
    print(f"resumed from step 1: {'equal' if all(torch.equal(*pair) for pair in pairs) else 'DIFFERENT'}")
    last = [entry for entry in ours.state.log_history[-1].items() if entry[0].startswith("nvme_")]
    print("the last line of the log:", ", ".join(f"{name} {value >> 20} MiB" for name, value in last))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as place:
        try:
            main(place)
        except ImportError as error:
            sys.exit(f"trainer.py: {error}: pip install transformers accelerate")
