"""Weights in blocks of 8-bit floats: round trips, comparison with transformers, and rejected folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from slime.cli import main
from slime.config import Config
from slime.driver.plan.plan import choose_rollout_backend
from slime.errors import UserError
from slime.models.loading import load_causal_lm
from slime.models.safetensors_io import FP8, LARGEST, dequantize_block, open_weights, quantize_block
from tests.engine.fake_packages import write_packages
from tests.tiny_models import make_model_folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return dict(open_weights(folder))


@pytest.mark.parametrize("shape", [(256, 384), (128, 128), (130, 5), (1, 300)])
def test_representable_values_round_trip_exactly(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    exact = torch.randn(shape).to(FP8).float()
    exact[:: max(shape[0] - 1, 1), ::128] = LARGEST  # so that every block's scale is one
    for row in range(0, shape[0], 128):
        exact[row, ::128] = LARGEST
    stored, scale = quantize_block(exact)
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    assert torch.equal(scale, torch.ones_like(scale))
    assert torch.equal(dequantize_block(stored, scale), exact)


def test_each_block_has_its_own_scale_and_zeros_stay_zero() -> None:
    weight = torch.zeros(256, 256)
    weight[:128, :128] = 1e-6
    weight[128:, :128] = 448 * 3
    weight[128, 200] = -7
    stored, scale = quantize_block(weight)
    assert scale[0].tolist() == pytest.approx([1e-6 / 448, 1.0])
    assert scale[1].tolist() == pytest.approx([3.0, 7 / 448])
    back = dequantize_block(stored, scale)
    assert torch.allclose(back, weight, rtol=1e-6)
    assert torch.equal(back[:128, 128:], torch.zeros(128, 128))


def test_rounding_error_is_at_most_half_a_step() -> None:
    torch.manual_seed(1)
    weight = torch.randn(300, 200)
    for power_of_two in (False, True):
        stored, scale = quantize_block(weight, power_of_two=power_of_two)
        assert not power_of_two or torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
        off = (dequantize_block(stored, scale) - weight).abs()
        spread = scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
        assert bool((off <= torch.maximum(weight.abs() / 16, spread * 2**-10) * 1.0001).all())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "bf16"
    make_model_folder(folder, "qwen3", hidden_size=128, intermediate_size=256, head_dim=32)
    return folder


@pytest.fixture(scope="module")
def quantized(model: Path) -> Path:
    folder = model.parent / "fp8"
    assert main(["convert", str(model), str(folder), "--dtype", "fp8"]) == 0
    return folder


def test_converted_folder_describes_its_quantization(model: Path, quantized: Path) -> None:
    plain, found = tensors(model), tensors(quantized)
    scaled = {name.removesuffix("_scale_inv") for name in found if name.endswith("_scale_inv")}
    assert scaled == {name for name in plain if "_proj.weight" in name}
    assert {found[name].dtype for name in scaled} == {FP8}
    assert {found[f"{name}_scale_inv"].dtype for name in scaled} == {torch.float32}
    assert {tensor.dtype for name, tensor in found.items() if name in plain and name not in scaled} == {torch.bfloat16}
    config = json.loads((quantized / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
    }  # fmt: skip
    assert (quantized / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_dequantized_weights_match_transformers(model: Path, quantized: Path, tmp_path: Path) -> None:
    assert main(["convert", str(quantized), str(tmp_path / "again"), "--dtype", "float32"]) == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        quantized, dtype=torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    expected = theirs.state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.allclose(tensor, expected[name].float(), rtol=1e-6), name
    off = [(tensor - tensors(model)[name]).abs().max() for name, tensor in tensors(tmp_path / "again").items()]
    assert 0 < max(off) < 0.1


def test_requantization_keeps_the_weights(quantized: Path, tmp_path: Path) -> None:
    assert main(["convert", str(quantized), str(tmp_path / "plain"), "--dtype", "float32"]) == 0
    assert main(["convert", str(tmp_path / "plain"), str(tmp_path / "fp8"), "--dtype", "fp8"]) == 0
    before, after = tensors(quantized), tensors(tmp_path / "fp8")
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name].float(), after[name].float(), rtol=1e-6) for name in before)


def test_scales_in_another_file_are_found(quantized: Path, tmp_path: Path) -> None:
    split = tmp_path / "split"
    split.mkdir()
    (split / "config.json").write_bytes((quantized / "config.json").read_bytes())
    whole = load_file(quantized / "model.safetensors")
    for part, wanted in (("1", True), ("2", False)):
        save_file(
            {n: t for n, t in whole.items() if n.endswith("_scale_inv") is wanted}, split / f"model-{part}.safetensors"
        )
    for source, target in ((split, "a"), (quantized, "b")):
        assert main(["convert", str(source), str(tmp_path / target)]) == 0
    left, right = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_rejects_unreadable_weights(quantized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    weights = load_file(quantized / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text())

    def sentence(facts: dict[str, object]) -> str:
        (other / "config.json").write_text(json.dumps(facts))
        assert main(["convert", str(other), str(tmp_path / "out")]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "has no *.safetensors weights" in sentence(config)
    name = next(name for name in weights if name.endswith("_scale_inv"))
    save_file({n: t for n, t in weights.items() if n != name}, other / "model.safetensors")
    assert f"{name.removesuffix('_scale_inv')} in {other} is in 8-bit floats without a scale" in sentence(config)
    gptq = {**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert "is quantised (gptq): only blocks of 8-bit floats can be converted" in sentence(gptq)
    (other / "model.safetensors").write_bytes(b"not a tensor")
    assert "it is not a safetensors file" in sentence(config)


def test_convert_replaces_only_its_own_output_and_only_with_force(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(model), str(out)]) == 0
    assert main(["convert", str(model), str(out)]) == 2
    assert "is there already: choose another folder, or replace it with --force" in capsys.readouterr().err
    assert main(["convert", str(model), str(out), "--dtype", "float32", "--force"]) == 0
    assert {tensor.dtype for tensor in tensors(out).values()} == {torch.float32}
    (out / "notes.txt").write_text("mine")
    assert main(["convert", str(model), str(out), "--force"]) == 2
    assert "notes.txt, which no run saved there" in capsys.readouterr().err
    assert main(["convert", str(model), str(model), "--force"]) == 2


def test_rejects_training_a_quantized_folder_with_sglang(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would cast new weights to 8 bits and keep the old scales. Serving without training is allowed."""
    monkeypatch.setenv("PYTHONPATH", str(write_packages(tmp_path / "packages")))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = Config(hf_checkpoint=str(quantized), rollout_batch_size=1, rollout_num_gpus=1, rollout_backend="sglang")
    with pytest.raises(UserError) as refused:
        choose_rollout_backend(config, "cpu")
    assert str(refused.value) == (
        f"--hf-checkpoint {quantized} is quantised (fp8), and SGLang's engines cannot be sent trained weights for it: "
        f"write it in plain numbers first (slime convert {quantized} DIR) and give that folder"
    )
    assert choose_rollout_backend(config.replace(debug_rollout_only=True), "cpu")[0] == "sglang"
    assert choose_rollout_backend(config.replace(rollout_backend="embedded"), "cpu")[0] == "embedded"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_quantized_folder_is_loaded_dequantized(family: str, tmp_path: Path) -> None:
    """Includes sizes that the block size does not divide, and experts, which transformers fuses on load."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 80} if family == "qwen3_moe" else {}
    plain = make_model_folder(tmp_path / "plain", family, hidden_size=160, intermediate_size=200, **experts)
    GenerationConfig(eos_token_id=[2, 9]).save_pretrained(plain)
    fp8, back = tmp_path / "fp8", tmp_path / "back"
    assert main(["convert", str(plain), str(fp8), "--dtype", "fp8"]) == 0
    assert main(["convert", str(fp8), str(back), "--dtype", "float32"]) == 0
    how = {"dtype": torch.float32, "device": "cpu", "attn_implementation": "sdpa"}
    model, expected = load_causal_lm(fp8, **how), load_causal_lm(back, **how)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    prompt = torch.tensor([[5, 6, 7]])
    assert torch.equal(model(prompt).logits, expected(prompt).logits)
    assert model.generation_config.eos_token_id == [2, 9]
    names = revert_weight_conversion(model, model.state_dict())
    assert names.keys() - {"lm_head.weight"} == dict(open_weights(plain)).keys() - {"lm_head.weight"}
