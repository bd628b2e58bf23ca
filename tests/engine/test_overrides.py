"""Index top-k settings and other overrides reach the model's config before it is read."""

from __future__ import annotations

import pytest

from app.engine.models.overrides import merge_overrides
from app.errors import SettingsError
from tests.engine.rig import loaded


@pytest.mark.contract(92)
def test_settings_merge_into_the_overrides_and_leave_other_keys() -> None:
    """Frequency and offset replace overrides of their names; other keys survive; nothing given changes nothing."""
    given = {"index_topk": 64, "index_topk_freq": 3}
    assert merge_overrides(given, 4, 3) == {
        "index_topk": 64,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
    }
    assert merge_overrides(given, None, None) == given
    assert merge_overrides(None, None, None) == {}
    assert given == {"index_topk": 64, "index_topk_freq": 3}


@pytest.mark.contract(92)
@pytest.mark.parametrize("overrides", [None, {"index_skip_topk_offset": 0}])
def test_an_offset_of_0_is_unset(overrides: dict[str, int] | None) -> None:
    """An offset of 0 leaves the model's own, wherever it was written."""
    assert "index_skip_topk_offset" not in merge_overrides(overrides, 2, 0)


@pytest.mark.contract(92)
def test_the_layers_of_a_model_derive_from_the_merged_overrides() -> None:
    """Frequency 4 and offset 3 over 12 layers give F F F S S S F S S S F S, and buffers on the F layers only."""
    merged = merge_overrides({"num_hidden_layers": 12, "index_topk": 64}, 4, 3)
    engine = loaded("glm-dsa-tiny", overrides=merged)
    buffers = {b.name: b.layer_ids for b in engine.geometry.buffers}
    assert buffers["target.index"] == (0, 1, 2, 6, 10)
    assert buffers["target.latent"] == tuple(range(12))
    assert buffers["draft.index"] == (12,)


def test_overrides_change_the_revision() -> None:
    """Two nodes with different overrides have different revisions, so they refuse each other."""
    assert loaded("glm-dsa-tiny").revision == loaded("glm-dsa-tiny").revision
    assert loaded("glm-dsa-tiny").revision != loaded("glm-dsa-tiny", overrides={"index_topk": 64}).revision


def test_an_override_that_no_config_knows_is_refused_by_name() -> None:
    """A misspelt override stops the start and is named."""
    with pytest.raises(SettingsError, match="index_topk_frequency"):
        loaded("glm-dsa-tiny", overrides={"index_topk_frequency": 4})


def test_a_first_layer_without_an_index_is_refused() -> None:
    """A pattern that leaves layer 0 nothing to share is refused at the start, not in the first forward."""
    with pytest.raises(SettingsError, match="layer 0"):
        loaded("glm-dsa-tiny", overrides={"index_topk_pattern": "SFFF"})


def test_a_model_with_weights_takes_no_overrides() -> None:
    """Overrides for a model whose config comes with its weights are refused."""
    with pytest.raises(SettingsError, match="smollm2"):
        loaded("smollm2", overrides={"hidden_size": 1})
