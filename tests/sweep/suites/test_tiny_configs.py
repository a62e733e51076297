"""Ways to make a configuration small."""

from __future__ import annotations

from typing import Any, ClassVar

from checked_backend.sweep.suites.huggingface import WAYS, Shrinking, tiny_config
from tests.support.stub_config import Stub


def shrunk(way: Shrinking | None = None, **values: Any) -> Any:
    return tiny_config(type("Kind", (Stub,), {"values": values}), way or WAYS[0])


def test_the_smallest_has_numbers_that_fit_together() -> None:
    found = shrunk(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128, num_hidden_layers=40)
    assert found.hidden_size == found.num_attention_heads * found.head_dim
    assert found.num_attention_heads % found.num_key_value_heads == 0
    assert found.num_hidden_layers == 2


def test_the_heads_of_linear_attention_are_as_small_as_others() -> None:
    found = shrunk(linear_num_heads=64, linear_head_dim=128, linear_conv_kernel_dim=4)
    assert (found.linear_num_heads, found.linear_head_dim, found.linear_conv_kernel_dim) == (4, 8, 4)


def test_an_image_with_a_length_for_each_side_and_the_length_of_a_series_are_made_small() -> None:
    values = {"image_size": [640, 448], "patch_size": (16, 4), "context_length": 16384}
    found = shrunk(**values)
    assert (found.image_size, found.patch_size, found.context_length) == ([32, 32], (8, 4), 64)
    assert shrunk(Shrinking(lengths=False), **values).given == {}


def test_the_channels_of_a_vocoder_are_made_small() -> None:
    found = shrunk(upsample_initial_channel=512, flow_size=192, upsample_rates=[8, 8, 2, 2])
    assert (found.upsample_initial_channel, found.flow_size, found.upsample_rates) == (64, 32, [8, 8, 2, 2])


def test_as_many_groups_as_heads_stay_as_many() -> None:
    for way in WAYS:
        found = shrunk(way, num_attention_heads=32, num_key_value_heads=32)
        assert found.num_attention_heads == found.num_key_value_heads


def test_what_is_small_already_and_what_has_no_rule_stays() -> None:
    found = shrunk(hidden_size=16, num_hidden_layers=1, tie_word_embeddings=True, hidden_act="gelu", oddity=4096)
    assert found.given == {}


def test_a_layer_of_each_kind_is_kept_and_lists_by_layer_are_cut_alike() -> None:
    found = shrunk(
        num_hidden_layers=4, layer_types=["slide", "slide", "full", "slide"], windows=[1, 2, 3, 4], other=[1, 2, 3]
    )
    assert (found.num_hidden_layers, found.layer_types, found.windows) == (2, ["slide", "full"], [1, 3])
    assert found.other == [1, 2, 3]


def test_stages_stay_and_have_one_layer_each() -> None:
    found = shrunk(depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24], num_layers=4)
    assert (found.depths, found.num_heads, found.num_layers) == ([1, 1, 1, 1], [3, 6, 12, 24], 4)


def test_a_factor_keeps_proportions() -> None:
    found = shrunk(
        Shrinking(factor=16),
        embed_dim=96,
        hidden_sizes=[96, 192],
        num_attention_heads=12,
        patch_size=16,
        rope_parameters={"mrope_section": [16, 32], "rope_type": "default"},
        num_channels=3,
        intermediate_size=100,  # cannot be divided
    )
    assert (found.embed_dim, found.hidden_sizes, found.num_attention_heads) == (6, [6, 12], 12)
    assert (found.patch_size, found.num_channels, found.intermediate_size) == (8, 3, 100)
    assert found.rope_parameters == {"mrope_section": [1, 2], "rope_type": "default"}


def test_fewer_heads_stay_as_large() -> None:
    found = shrunk(
        Shrinking(factor=16, fewer_heads=True),
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_parameters={"mrope_section": [16, 24, 24]},
    )
    assert (found.hidden_size, found.num_attention_heads, found.num_key_value_heads, found.head_dim) == (256, 2, 1, 128)
    assert found.rope_parameters == {"mrope_section": [16, 24, 24]}


def test_special_tokens_are_in_the_vocabulary_and_differ() -> None:
    found = shrunk(vocab_size=50000, pad_token_id=49999, image_token_id=40000, video_token_index=40001, sep_token_id=-1)
    tokens = [found.pad_token_id, found.image_token_id, found.video_token_index]
    assert len(set(tokens)) == 3
    assert all(0 <= token < 64 < found.vocab_size for token in tokens)  # ordinary tokens are higher
    assert found.sep_token_id == -1


def test_what_is_left_open_is_filled_only_if_asked() -> None:
    assert shrunk(vocab_size=None, head_dim=None).given == {}
    found = shrunk(Shrinking(fill=True), vocab_size=None, head_dim=None, prediction_length=None, label=None)
    assert found.given == {"vocab_size": 128, "head_dim": 8, "prediction_length": 8}


class Part(Stub):
    model_type = "part"
    values: ClassVar[dict[str, Any]] = {"hidden_size": 768, "stages": 1, "use_cache": True}


class Whole(Stub):
    values: ClassVar[dict[str, Any]] = {"hidden_size": 512, "part_config": Part(stages=5)}
    sub_configs: ClassVar[dict[str, Any]] = {"part_config": Part}


def test_parts_are_shrunk_and_keep_what_the_whole_gives_them() -> None:
    found = tiny_config(Whole, WAYS[0])
    assert (found.hidden_size, found.part_config.hidden_size, found.part_config.stages) == (32, 32, 5)
    assert found.part_config.use_cache is False


def test_the_last_way_is_the_model_as_it_is() -> None:
    assert shrunk(WAYS[-1], hidden_size=768, num_hidden_layers=12, image_size=224, layer_types=["a"] * 12).given == {}
