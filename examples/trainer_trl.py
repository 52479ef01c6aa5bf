"""TRL's SFTTrainer with states and activations on storage. Run python examples/trainer_trl.py [FOLDER]."""

import sys
import tempfile
import warnings
from typing import Any

import torch

from nvme_ops.integrations.trainer import use_nvme


def main(folder: str) -> None:
    import datasets
    import transformers
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers

    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    words = Tokenizer(models.WordLevel({"end": 0, **{f"w{number}": number for number in range(1, 250)}}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="end", eos_token="end")
    texts = datasets.Dataset.from_dict({"text": [" ".join(["w1", f"w{number}"] * 64) for number in range(1, 33)]})
    sizes: Any = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}

    def trainer() -> Any:
        torch.manual_seed(7)
        arguments = trl.SFTConfig(
            f"{folder}/output", optim="adamw_torch", max_steps=2, logging_steps=1, bf16=False, save_strategy="no",
            report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=250, **sizes))
        return trl.SFTTrainer(model, args=arguments, train_dataset=texts, processing_class=tokenizer)

    expected, ours = trainer().train().training_loss, trainer()
    use_nvme(ours, folder, optimizer_budget="4M", activations_budget="4M")
    loss = ours.train().training_loss  # its log says what was moved
    print(f"loss {loss:.6f}: {'equal' if loss == expected else 'DIFFERENT'}")


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)  # from transformers, about TRL's arguments
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as place:
        try:
            main(place)
        except ImportError as error:
            sys.exit(f"trainer_trl.py: {error}: pip install trl")
