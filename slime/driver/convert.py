"""`slime convert FROM TO`: writes a checkpoint of a run or of Megatron, or a model folder in another precision, as a
Hugging Face folder; or a Hugging Face folder as a checkpoint that Megatron loads (`--format torch_dist`).

Invariant: at most one shard of tensors is in memory; TO is the old folder or the complete new one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from slime.config.model_folder import find_readable_megatron
from slime.errors import UserError

if TYPE_CHECKING:
    import torch

FP8 = "fp8"
DTYPES = ("bfloat16", "float16", "float32", FP8)
TORCH_DIST = "torch_dist"
FORMATS = ("hf", TORCH_DIST)


@dataclass(frozen=True)
class Conversion:
    """A conversion and its options; an existing target is replaced only with `force`, and only if slime wrote it."""

    source: Path
    target: Path
    dtype: str = "bfloat16"
    model_folder: Path | None = None
    power_of_two_scales: bool = False
    add_missing: bool = False
    force: bool = False
    trust_remote_code: bool = False
    format: str = FORMATS[0]

    def run(self) -> Path:
        """Write the folder and return it; a source that cannot be converted is a `UserError`, and the target stays."""
        if not self.source.is_dir():
            raise UserError(f"there is no folder {self.source} to convert")
        if self.target.exists() and not self.force:
            raise UserError(f"{self.target} is there already: choose another folder, or replace it with --force")
        if self.format == TORCH_DIST:
            import torch

            from slime.models.dequantized import plain_sources
            from slime.models.torch_dist.hugging_face import model_entries
            from slime.models.torch_dist.writing import write_release

            if not (self.source / "config.json").is_file():
                raise UserError(f"{self.source} has no config.json: --format {TORCH_DIST} takes a Hugging Face folder")
            if self.dtype == FP8:
                raise UserError(
                    f"--dtype {FP8} is for Hugging Face folders: --format {TORCH_DIST} holds no FP8 weights"
                )
            sources = plain_sources(self.source)
            entries, alike = model_entries(self.source, sources)
            return write_release(sources, entries, self.target, dtype=getattr(torch, self.dtype), alike=alike)
        small_files, tensors = self._read()
        import torch

        from slime.models.safetensors_io import BlockQuantizer
        from slime.models.saving import save_hf_folder

        if self.dtype != FP8:
            return save_hf_folder(tensors, small_files, self.target, getattr(torch, self.dtype))
        quantizer = BlockQuantizer(power_of_two=self.power_of_two_scales)
        stream = quantizer.stream(tensors, torch.bfloat16)
        return save_hf_folder(stream, small_files, self.target, torch.bfloat16, quantization=quantizer.config)

    def _read(self) -> tuple[Path, Iterator[tuple[str, torch.Tensor]]]:
        """Return the folder with config and tokenizer, and every weight, dequantized."""
        megatron = find_readable_megatron(self.source, str(self.source))
        if megatron is not None:
            from slime.models.dequantized import plain_sources
            from slime.models.tensor_sources import read_whole
            from slime.models.torch_dist.hugging_face import checkpoint_sources

            model_folder = self.model_folder
            if model_folder is None or not (model_folder / "config.json").is_file():
                raise UserError(
                    f"{self.source} is a Megatron checkpoint, which does not describe its model: name the Hugging Face "
                    "folder of that model with --hf-checkpoint"
                )
            found = checkpoint_sources(model_folder, megatron)
            if self.add_missing:
                found = {**plain_sources(model_folder), **found}
            return model_folder, ((name, read_whole(source)) for name, source in found.items())
        from slime.train.checkpoints.export_hf import checkpoint_tensors, find_checkpoint, model_of_checkpoint

        checkpoint = find_checkpoint(self.source)
        if checkpoint is not None:
            folder = self.model_folder or model_of_checkpoint(checkpoint)
            return folder, checkpoint_tensors(
                checkpoint, folder, add_missing=self.add_missing, trust_remote_code=self.trust_remote_code
            )
        if not (self.source / "config.json").is_file():
            raise UserError(f"{self.source} is neither a checkpoint (meta.json) nor a model folder (config.json)")
        from slime.models.dequantized import plain_tensors

        return self.source, plain_tensors(self.source)


def convert_command(words: Sequence[str]) -> int:
    """Run the command; wrong arguments are a `UserError`."""
    parser = _Parser(
        prog="slime convert",
        description="Write a checkpoint of a run or of Megatron, or a model folder (plain or in blocks of 8-bit "
        "floats), as a Hugging Face folder in the given precision; or a model folder as a Megatron checkpoint.",
    )
    parser.add_argument(
        "source", metavar="FROM", help="checkpoints of --save or of Megatron, one of them, or a model folder"
    )
    parser.add_argument("target", metavar="TO", help="the folder to write")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="torch_dist: Megatron's checkpoints")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="fp8: blocks of 128 x 128")
    parser.add_argument("--scale-fmt", choices=("float32", "ue8m0"), default="float32", help="ue8m0: powers of 2")
    parser.add_argument("--hf-checkpoint", metavar="DIR", help="the model folder of a checkpoint (default: its run's)")
    parser.add_argument("--add-missing", action="store_true", help="copy weights that the checkpoint does not have")
    parser.add_argument("--force", action="store_true", help="replace a folder that slime wrote at TO")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model folder's own code")
    options = parser.parse_args(list(words))
    conversion = Conversion(
        source=Path(options.source),
        target=Path(options.target),
        dtype=options.dtype,
        model_folder=None if options.hf_checkpoint is None else Path(options.hf_checkpoint),
        power_of_two_scales=options.scale_fmt == "ue8m0",
        add_missing=options.add_missing,
        force=options.force,
        trust_remote_code=options.trust_remote_code,
        format=options.format,
    )
    print(f"{conversion.run()} is written, in {options.dtype}")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"slime convert: {message}; slime convert --help lists its arguments")
