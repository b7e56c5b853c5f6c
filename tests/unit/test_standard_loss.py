"""The chunked loss inside transformers models: same losses and gradients, right logits, no trace of it in copies."""

from __future__ import annotations

import copy
import io
import pickle
import types
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from training_xpu.blocks import LOSS, published, withdraw
from training_xpu.compiler.loss.attached import steps
from training_xpu.compiler.loss.deferred import DeferredLogits, scale_and_softcap
from training_xpu.compiler.loss.standard_loss import Installed, install

VOCABULARY = 97
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "use_cache": False,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make(name: str = "llama", **settings: Any) -> Any:
    import transformers

    options: dict[str, dict[str, Any]] = {
        "Qwen3": {"head_dim": 8},
        "Mixtral": {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5},
        "Gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0},
        "Cohere": {"logit_scale": 0.3},
        "Granite": {"logits_scaling": 3.0},
    }
    torch.manual_seed(0)
    family = {"llama": "Llama", "tied": "Llama"}.get(name, name)
    if name == "tied":
        settings["tie_word_embeddings"] = True
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options.get(family, {}), **settings})
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


def batch(seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (2, 12), generator=generator)
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(torch.rand(2, 12, generator=generator) < 0.3, -100),
    }


def step(model: Any, bf16: bool = False, **inputs: Any) -> tuple[Any, list[torch.Tensor]]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        output = model(**{**batch(), **inputs})
    output.loss.backward()
    return output, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def installed(model: Any) -> Installed:
    made = install(model)
    assert isinstance(made, Installed), made
    return made


def assert_same(ours: Any, plain: Any, tolerance: float = 5e-6) -> None:
    torch.testing.assert_close(ours[0].loss, plain[0].loss, rtol=tolerance, atol=0)
    assert ours[0].loss.dtype == plain[0].loss.dtype
    assert len(ours[1]) == len(plain[1])
    for a, b in zip(ours[1], plain[1], strict=True):
        assert float((a - b).norm()) <= tolerance * float(b.norm()) + 1e-7


@pytest.mark.parametrize("name", ["llama", "tied", "Qwen3", "Mixtral", "Gemma2", "Cohere", "Granite"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "autocast"])
def test_losses_gradients_and_logits_are_the_same(name: str, bf16: bool) -> None:
    model = make(name)
    plain = step(model, bf16)
    made = installed(model)
    ours = step(model, bf16)
    assert type(ours[0].logits) is DeferredLogits
    assert_same(ours, plain, 2e-2 if bf16 else 5e-6)
    assert made.habits[True].misses == 0
    assert ours[0].logits.shape == plain[0].logits.shape
    assert ours[0].logits.dtype == plain[0].logits.dtype
    assert torch.equal(ours[0].logits.detach(), plain[0].logits.detach())
    if name == "Mixtral":
        assert torch.equal(ours[0].aux_loss, plain[0].aux_loss)


@pytest.mark.parametrize(
    "inputs",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"ignore_index": 5},
        {"shift_labels": batch(9)["labels"]},
        {"return_dict": False},
        {"labels": torch.full((2, 12), -100)},
    ],
    ids=lambda given: next(iter(given)),
)
def test_arguments_of_the_loss(inputs: dict[str, Any]) -> None:
    model = make()
    if "ignore_index" in inputs:
        labels = batch()["labels"]
        inputs = {**inputs, "labels": labels.masked_fill(labels == -100, inputs["ignore_index"])}
    found = []
    for chunked in (False, True):
        if chunked:
            made = installed(model)
        model.zero_grad()
        output = model(**{**batch(), **inputs})
        loss = output[0]
        loss.backward()
        found.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=5e-6, atol=0, equal_nan=True)
    for a, b in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert made.habits[True].forwards == 1
    assert made.habits[True].misses == 0


def test_positional_arguments() -> None:
    model = make()
    plain = model(**batch()).loss
    made = installed(model)
    given = batch()
    names = ["input_ids", "attention_mask", "position_ids", "cache", "inputs_embeds", "labels"]
    arguments = [given.get(name) for name in names]
    torch.testing.assert_close(model(*arguments).loss, plain, rtol=5e-6, atol=0)
    assert made.habits[True].forwards == 1


def test_half_precision_weights() -> None:
    model = make().to(torch.bfloat16)
    plain = step(model)
    installed(model)
    ours = step(model)
    assert type(ours[0].logits) is DeferredLogits
    assert_same(ours, plain, 2e-2)


def test_a_frozen_head_gets_no_gradient() -> None:
    model = make()
    model.lm_head.weight.requires_grad_(False)
    plain = step(model)
    installed(model)
    assert_same(step(model), plain)
    assert model.lm_head.weight.grad is None


def test_without_labels_nothing_is_deferred() -> None:
    model = make()
    made = installed(model)
    tokens = batch()["input_ids"]
    assert type(model(input_ids=tokens).logits) is torch.Tensor
    model.eval()
    generated = model.generate(input_ids=tokens, max_new_tokens=3, do_sample=False)
    made.uninstall()
    assert torch.equal(generated, model.generate(input_ids=tokens, max_new_tokens=3, do_sample=False))


def test_evaluation_with_labels_is_chunked_without_a_graph() -> None:
    model = make().eval()
    made = installed(model)
    with torch.no_grad():
        output = model(**batch())
    assert made.habits[False].forwards == 1
    assert not output.loss.requires_grad
    assert not output.logits.requires_grad
    assert not output.logits.float().sum().requires_grad


def test_inference_mode() -> None:
    model = make().eval()
    plain = model(**batch())
    installed(model)
    with torch.inference_mode():
        output = model(**batch())
        assert type(output.logits) is DeferredLogits
        torch.testing.assert_close(output.loss, plain.loss, rtol=5e-6, atol=0)
        torch.testing.assert_close(output.logits + 0, plain.logits)


def test_a_loss_of_the_users_own_from_the_logits_has_its_gradient() -> None:
    model = make("Gemma2")

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        output = model(**batch())
        assert output.logits.requires_grad
        seen: list[torch.Tensor] = []
        output.logits.register_hook(seen.append)
        (output.loss + F.softmax(output.logits.float(), -1).square().sum()).backward()
        assert len(seen) == 1
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    installed(model)
    for a, b in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x[:, -1],
        lambda x: x.argmax(-1),
        lambda x: torch.stack([x, x]),
        lambda x: x * 2 + 1,
        lambda x: 1 - x,
        lambda x: x.to("cpu", torch.float64),
        lambda x: x.half(),
        lambda x: x.detach().numpy(),
        lambda x: x.tolist(),
        lambda x: x.contiguous().view(-1, VOCABULARY),
        lambda x: x.data.mul_(2),
        lambda x: copy.deepcopy(x.detach()),
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: next(iter(x)),
        lambda x: torch.tanh(x / 3.0) * 3.0,
        lambda x: F.log_softmax(x, -1),
        lambda x: torch.nn.Identity()(x).sum(),
        lambda x: torch.empty_like(x).zero_(),
        repr,
    ],
)
def test_whatever_reads_logits_sees_them(use: Any) -> None:
    model = make()
    with torch.no_grad():
        plain = model(**batch()).logits
        made = installed(model)
        deferred = model(**batch()).logits
        assert type(deferred) is DeferredLogits
        found, wanted = use(deferred), use(plain)
        if isinstance(wanted, torch.Tensor):
            assert torch.equal(found + 0, wanted)
            assert found.dtype == wanted.dtype
        else:
            assert type(found) is type(wanted)
            assert str(found) == str(wanted)
    made.uninstall()


def test_saving_logits_saves_their_values() -> None:
    model = make()
    installed(model)
    output = model(**batch())
    file = io.BytesIO()
    torch.save(output.logits.detach(), file)
    file.seek(0)
    assert torch.equal(torch.load(file), model(input_ids=batch()["input_ids"]).logits)


def test_an_autograd_function_around_the_output_keeps_them_deferred() -> None:
    class Passed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            return given.detach()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    model = make()
    made = installed(model)
    logits = Passed.apply(model(**batch()).logits)  # type: ignore[no-untyped-call]
    assert type(logits) is DeferredLogits
    assert logits.requires_grad
    assert made.habits[True].reads == 0
    assert logits.sum().requires_grad


def test_what_is_kept_by_detach_is_what_the_weights_gave_then() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    right = model(**batch()).logits.detach()
    installed(model)
    output, _ = step(model)
    kept = output.logits.detach()
    optimizer.step()
    assert torch.equal(kept, right)


def test_logits_read_after_an_update_warn_and_come_in_time_from_then_on() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    made = installed(model)
    output, _ = step(model)
    optimizer.step()
    with pytest.warns(RuntimeWarning, match="after the model's weights had changed"):
        output.logits.sum()
    assert made.off == "its logits are read after its weights have changed"
    output, _ = step(model)
    assert type(output.logits) is torch.Tensor


def test_a_script_that_reads_logits_in_every_step_gets_them_plain() -> None:
    model = make()
    made = installed(model)
    for _ in range(3):
        output = model(**batch())
        output.logits.argmax(-1)
    assert made.off == "its logits are read"
    assert type(output.logits) is torch.Tensor
    model.eval()
    assert type(model(**batch()).logits) is DeferredLogits  # evaluation has habits of its own


def test_what_the_forward_does_to_logits_is_learned() -> None:
    model = make("Granite")
    plain = step(model)
    made = installed(model)
    made.scale_and_softcap = (1.0, None)
    for learned in (False, True, True):
        ours = step(model)
        assert_same(ours, plain)
        assert (ours[0].logits._real is None) is learned
        assert made.habits[True].reads == 0
        assert made.habits[True].misses == 1
        assert made.scale_and_softcap[0] == pytest.approx(1 / 3)


def test_labels_changed_on_the_way_give_the_plain_loss() -> None:
    model = make()
    made = installed(model)

    def change(module: Any, args: Any, output: Any) -> None:
        given["labels"][:, 0:6] = -100

    handle = model.model.register_forward_hook(change)
    for _ in range(3):
        given = batch()
        found = model(**given).loss
    handle.remove()
    made.uninstall()
    torch.testing.assert_close(found, model(**given).loss)
    assert made.off is not None


def test_a_hook_of_the_users_on_the_head_sees_logits() -> None:
    model = make()
    installed(model)
    seen: list[Any] = []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    model(**batch())
    assert seen == [torch.Tensor]
    handle.remove()
    assert type(model(**batch()).logits) is DeferredLogits


def test_an_exception_in_a_forward_leaves_nothing_behind() -> None:
    model = make()
    installed(model)
    wrong = batch()
    wrong["labels"] = wrong["labels"].masked_fill(wrong["labels"] == -100, VOCABULARY)
    with pytest.raises(IndexError, match="out of bounds"):
        model(**wrong)
    assert type(model(input_ids=wrong["input_ids"]).logits) is torch.Tensor
    assert type(model(**batch()).logits) is DeferredLogits


def test_uninstalled_models_are_as_before() -> None:
    model = make()
    others = steps._users
    state, own, head = list(model.state_dict()), set(model.__dict__), set(model.lm_head.__dict__)
    made = installed(model)
    assert install(model) is made
    assert list(model.state_dict()) == state
    assert published(model, LOSS) is not None
    made.uninstall()
    made.uninstall()
    assert set(model.__dict__) == own
    assert set(model.lm_head.__dict__) == head
    assert not any(
        hooks for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks) if m is not model.model
    )
    assert published(model, LOSS) is None
    assert steps._users == others
    assert type(model(**batch()).logits) is torch.Tensor
    withdraw(model, LOSS)


def test_copies_and_pickles_know_nothing_of_it() -> None:
    model = make()
    plain = model(**batch()).loss
    made = installed(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        output = other(**batch())
        assert type(output.logits) is torch.Tensor
        assert torch.equal(output.loss, plain)
        assert isinstance(install(other), Installed)
        torch.testing.assert_close(other(**batch()).loss, plain, rtol=5e-6, atol=0)
    assert made.habits[True].forwards == 0


def test_the_model_is_not_kept_alive() -> None:
    import gc
    import weakref

    model = make()
    installed(model)
    model(**batch()).loss.backward()
    gone = weakref.ref(model)
    others = steps._users
    del model
    gc.collect()
    assert steps._users < others
    assert gone() is None


def other_loss(model: Any) -> Any:
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.mean()
    return model


def own_forward(model: Any) -> Any:
    class Own(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            return types.SimpleNamespace(loss=self.lm_head(self.model(input_ids).last_hidden_state).mean())

    model.__class__ = Own
    return model


def wrapped_head(model: Any) -> Any:
    model.lm_head = torch.nn.Sequential(model.lm_head)
    return model


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other_loss, "not the standard one"),
        (own_forward, "does not call its loss function"),
        (wrapped_head, "no linear layer but Sequential"),
        (lambda _: torch.nn.Linear(2, 2), "no transformers model"),
    ],
)
def test_other_losses_are_left_alone_with_a_reason(change: Any, reason: str) -> None:
    model = change(make())
    before = set(model.__dict__)
    told = install(model)
    assert isinstance(told, str)
    assert reason in told
    assert "\n" not in told
    assert set(model.__dict__) == before
    assert published(model, LOSS) is None


def test_a_head_that_was_replaced_later_is_not_chunked() -> None:
    model = make()
    made = installed(model)
    model.lm_head = torch.nn.Linear(32, VOCABULARY, bias=False)
    assert type(model(**batch()).logits) is torch.Tensor
    made.uninstall()


def test_under_torch_compile_the_plain_path_is_traced() -> None:
    model = make()
    plain = model(**batch()).loss
    made = installed(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = torch.compile(model, backend="eager")(**batch())
    torch.testing.assert_close(output.loss, plain)
    assert made.habits[True].forwards == 0


def test_memory_prediction_sees_no_full_logits() -> None:
    from training_xpu.recompute.prediction.predict import predict_peaks
    from training_xpu.recompute.prediction.setting import TrainingSetting

    model = make("tied", vocab_size=60000)
    setting = TrainingSetting(batch_size=2, sequence_length=512, dtype="fp32")
    plain = predict_peaks(model, setting)
    made = installed(model)
    chunked = predict_peaks(model, setting)
    logits = 2 * 512 * 60000 * 4
    assert max(plain.peaks) - max(chunked.peaks) > logits
    made.uninstall()
    assert predict_peaks(model, setting).peaks == plain.peaks


def test_what_was_recorded_as_scale_and_softcap() -> None:
    assert scale_and_softcap(()) == (1.0, None)
    assert scale_and_softcap((("multiply", 0.5), ("multiply", 4.0))) == (2.0, None)
    assert scale_and_softcap((("multiply", 0.5), ("tanh", None), ("multiply", 4.0))) == (2.0, 4.0)
    assert scale_and_softcap((("tanh", None), ("tanh", None))) is None
    assert scale_and_softcap((("tanh", None), ("multiply", -1.0))) is None


def test_the_trainer_takes_its_own_way_with_label_smoothing(tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments

    rows = [{k: v[0] for k, v in batch(seed).items()} for seed in range(4)]
    losses: dict[tuple[float, bool], list[float]] = {}
    for smoothing in (0.0, 0.1):
        for chunked in (False, True):
            model = make()
            made = installed(model) if chunked else None
            arguments = TrainingArguments(
                output_dir=str(tmp_path),
                max_steps=2,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                label_smoothing_factor=smoothing,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
            )
            trainer = Trainer(model=model, args=arguments, train_dataset=rows)
            trainer.train()
            losses[smoothing, chunked] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
            if made is not None:
                assert (made.habits[True].forwards > 0) is (smoothing == 0.0)
                assert made.habits[True].misses == made.habits[True].reads == 0
        assert losses[smoothing, True] == pytest.approx(losses[smoothing, False], rel=1e-4)
