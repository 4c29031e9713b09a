"""Tests of bugs that were found and fixed in experts spread over ranks. Docstrings describe the bugs."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import bugs
import calls
import pytest
import torch.distributed as dist

from pymoe._ranks import GroupStore
from pymoe.ep import exchange


@pytest.mark.slow
def test_the_share_of_a_groups_losses_is_as_precise_in_padded_buffers(ranks):
    """The loss share was divided as integers on the device, in float32, and widened too late, so float64 losses
    lost precision.
    """
    exact, padded = ranks.run(bugs.shares_of_losses), ranks.run(bugs.shares_of_losses, **calls.PADDED)
    assert exact == padded


def test_check_calls_clears_the_notes_of_all_layers(ranks):
    """check_calls raised for the first layer and left the notes of the others, so the next check reported an old
    call.
    """
    for first, second in ranks.run(bugs.two_layers_that_disagree):
        assert first[0] == "GroupError"
        assert "MoE '1.0'" in first[1]
        assert second is None


@pytest.mark.parametrize("way", [{}, {"clones": 1}, calls.ONCE], ids=["plain", "clones", "deduplicated"])
def test_a_backward_pass_after_one_for_other_gradients_waits_for_its_exchanges(ranks, way):
    """With clones rows and weights arrive in one node, so a pass for one of them starts both exchanges and collects
    only one.

    The next pass over the kept graph then started an exchange into the same memory while the former one was still under
    way.
    """
    assert ranks.run(bugs.other_gradients_first, **way) == [[[], []]] * 4


@pytest.mark.parametrize("tied", [False, True])
def test_a_layer_that_shares_its_experts_does_not_move_alone(ranks, tied):
    """Layers outside the model that was passed kept the old placement and computed with the wrong experts."""
    for moving, calling, works in ranks.run(bugs.moved_without_another_layer, tied=tied):
        if tied:
            text = "redistribute: model must hold all layers that share parameters, got one without '1.0'"
            assert (moving[:2], calling) == (["ValueError", text], None)
        else:
            text = "MoE '1.0': layers that share experts must have one placement, got experts that have moved"
            assert moving is None
            assert calling[0] == "ValueError"
            assert text in calling[1]
        assert works


def test_a_router_in_a_wrapper_needs_no_options(ranks):
    """The comparison of options between ranks asked the wrapper for the options of a Router."""
    assert all(ranks.run(bugs.router_in_a_wrapper))


def test_options_that_change_in_every_call_are_not_kept():
    """A coefficient with a schedule left behind a text in every step."""
    for step in range(3 * exchange.MAX_OPTIONS):
        exchange._options_number(("z_loss_coef", step / 7))
    assert len(exchange._options) <= exchange.MAX_OPTIONS
    number = exchange._options_number(("z_loss_coef", 0.5))
    assert exchange._options[number] == "z_loss_coef=0.5"
    assert number == exchange._options_number(("z_loss_coef", 0.5))


@pytest.mark.parametrize("way", [{}, calls.PADDED], ids=["plain", "padded"])
def test_gradients_of_a_rank_without_experts_are_laid_out_as_those_of_the_others(ranks, way):
    """Gradients of a rank without rows had the strides 0, 0 of an expanded sum, so autograd copied them. In torch 2.11
    copying a DTensor is an exchange between all ranks; the other ranks made no copy, and the ranks hung.
    """
    assert ranks.run(bugs.strides_of_gradients, **way) == [[]] * 4


@pytest.mark.parametrize("kind", ["tcp", "hash", "file"])
def test_a_record_that_another_rank_deletes_is_there_or_not(kind, tmp_path):
    """A read asked whether there was a record, and then for it.

    Where it was deleted between the two, the store waited for another one until its timeout, and was then taken for
    lost; where it was deleted within the second, the answer was empty, and the read raised EOFError.
    """
    store = {
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=5)),
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
    }[kind]()
    ours, theirs = (GroupStore(SimpleNamespace(get_group_store=lambda: store), "test", 5.0) for _ in range(2))
    ended = threading.Event()

    def write_and_delete():
        while not ended.is_set():
            theirs.write_first("failure", ("rank", 1))
            theirs.delete("failure")

    other = threading.Thread(target=write_and_delete)
    other.start()
    try:
        found = {ours.read("failure") for _ in range(3000)}
    finally:
        ended.set()
        other.join()
    assert found <= {None, ("rank", 1)}
    assert (ours.lost, theirs.lost) == (None, None)
    assert ours.read("another") is None
    assert not store.check(["test/another"]), "a read writes nothing"


@pytest.mark.parametrize("function", ["shard", "data_parallel"])
def test_an_early_optimizer_is_noticed_although_its_parameters_have_gradients(ranks, function):
    """Gradients from before the parameters were replaced were taken as those of other code that still used them.

    So the step updated parameters that no layer used any more, and raised only after zero_grad().
    """
    text = f"SGD: an optimizer must be made after pymoe.ep.{function}"
    for *early, used in ranks.run(bugs.early_optimizer_of_gradients, function=function):
        assert [(kind, said.startswith(text)) for kind, said, _ in early] == [("RuntimeError", True)] * 3
        assert used is None


def test_fsdp_may_be_told_to_send_nothing_first(ranks):
    """init_sync=False was honoured, and then passed on to fully_shard, which raised a TypeError."""
    assert ranks.run(bugs.fsdp_without_first_broadcast) == [[True] * 4] * 4


def test_a_rank_with_one_expert_shows_one_number(ranks):
    """A rank with expert 4 alone was shown with the experts "4 to 4"."""
    assert ranks.run(bugs.own_experts_of, experts=5) == ["0 to 1", "2 to 3", "4", "none"]
