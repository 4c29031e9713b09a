"""What reports say of pipelines over processes, and what pipes do instead; under torch's schedules."""

import pytest

SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
ZERO_BUBBLE = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")
EXACT = 1e-12

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
some_schedules = pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleInterleavedZeroBubble"])


def test_all_stages_can_be_on_one_rank(ranks):
    for worst in ranks(2).run("promises.on_one_rank"):
        assert max(worst.values()) <= EXACT


@every_schedule
def test_no_forward_is_run_but_those_of_the_micro_batches(ranks, schedule):
    for found in ranks(2).run("promises.forwards", name=schedule):
        assert found == [8, [8, 24]] * (len(found) // 2)


@every_schedule
def test_gradients_of_several_steps_add_up(ranks, schedule):
    assert max(ranks(2).run("promises.accumulation", name=schedule, rows=[8, 8, 8])) <= EXACT


@every_schedule
def test_uneven_micro_batches_count_by_their_rows(ranks, schedule):
    assert max(ranks(2).run("promises.accumulation", name=schedule, rows=[7])) <= EXACT
    assert max(ranks(2).run("promises.accumulation", name=schedule, rows=[7, 9, 10])) <= EXACT


@some_schedules
def test_losses_that_are_sums_are_summed(ranks, schedule):
    assert max(ranks(2).run("promises.sums", name=schedule)) <= EXACT


@every_schedule
def test_batch_sizes_may_change_from_step_to_step(ranks, schedule):
    assert max(ranks(2).run("promises.batch_sizes", name=schedule)) <= EXACT


@pytest.mark.parametrize("world", [2, 3])
@every_schedule
def test_a_value_may_go_to_several_stages_and_past_others(ranks, schedule, world):
    assert max(ranks(world).run("promises.skips", name=schedule)) <= EXACT


@every_schedule
def test_shared_parameters_get_the_gradient_of_all_stages_and_stay_equal(ranks, schedule):
    found = ranks(3).run("promises.tied", name=schedule)
    assert max(rank["worst"] for rank in found) <= EXACT
    copies = [rank["copy"] for rank in found if rank["copy"]]
    assert len(copies) == 2
    assert copies[0] == copies[1]


def test_copies_of_shared_parameters_become_those_of_the_first_stage(ranks):
    first, _, last = ranks(3).run("promises.tied", name="ScheduleGPipe", same_start=False)
    assert first["copy"] == last["copy"]


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_stages_in_the_middle_take_arguments_that_the_first_rank_was_given(ranks, schedule):
    worst = ranks(3).run("promises.by_hand_steps", name=schedule, model="Middle", arguments=True)
    assert max(worst) <= EXACT


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_anything_can_go_from_rank_to_rank(ranks, schedule):
    worst = ranks(2).run("promises.by_hand_steps", name=schedule, model="Objects", arguments=False)
    assert max(worst) <= EXACT


@every_schedule
def test_auxiliary_losses_of_middle_stages_reach_their_parameters(ranks, schedule):
    for found in ranks(2).run("promises.auxiliary_loss", name=schedule):
        assert found["worst"] <= EXACT


@pytest.mark.parametrize("schedule", ZERO_BUBBLE)
def test_the_backward_of_a_function_runs_once_in_zero_bubble_schedules(ranks, schedule):
    for found in ranks(2).run("promises.function_backwards", name=schedule):
        assert found["calls"] == found["expected"]
        assert found["worst"] <= EXACT


@every_schedule
def test_hooks_are_called_once_a_step_for_parameters_and_once_a_micro_batch_for_values(ranks, schedule):
    for found in ranks(2).run("promises.hooks", name=schedule):
        assert found["counts"] == [[1, 1, 0 if found["is_first"] else 4]] * 3
        assert found["sum"]


@pytest.mark.parametrize(("schedule", "most"), [("Schedule1F1B", 2), ("ScheduleGPipe", 8)])
def test_activations_are_let_go_of_after_their_backward(ranks, schedule, most):
    first, last = ranks(2).run("promises.activations", name=schedule, micro_batches=8)
    assert first["most"][1] == most
    assert first["most"][0] <= most + 3  # some on their way
    assert last["most"][1] == (1 if schedule == "Schedule1F1B" else 8)
    assert first["left"] == last["left"] == [0, 0]


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@some_schedules
def test_random_numbers_are_those_of_a_pipe_in_one_process(ranks, schedule, checkpoint):
    for found in ranks(2).run("promises.random_numbers", name=schedule, checkpoint=checkpoint):
        assert found["worst"] <= EXACT
        assert found["alike"]


@every_schedule
def test_evaluation_between_steps_returns_outputs_and_adds_no_gradients(ranks, schedule):
    assert max(ranks(2).run("promises.evaluation", name=schedule)) <= EXACT


@some_schedules
def test_a_loss_with_parameters_gets_gradients(ranks, schedule):
    assert max(ranks(2).run("promises.loss_with_parameters", name=schedule)) <= EXACT


@pytest.mark.parametrize(("checkpoint", "calls"), [("never", 4), ("except_last", 7), ("always", 8)])
@some_schedules
def test_the_checkpointing_of_the_pipe_holds_on_ranks(ranks, schedule, checkpoint, calls):
    for found in ranks(2).run("promises.checkpointing", name=schedule, checkpoint=checkpoint):
        assert found["calls"] == calls
        assert found["worst"] <= EXACT


def test_buffers_stay_as_persistent_as_they_were(ranks):
    for mine, plain in ranks(2).run("promises.buffers"):
        assert mine == plain


def test_a_buffer_that_is_sent_may_be_changed_by_the_next_forward(ranks):
    assert max(ranks(2).run("promises.buffers_on_their_way", micro_batches=6)) <= EXACT


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "ScheduleInterleavedZeroBubble"])
def test_layers_may_be_compiled(ranks, schedule):
    assert max(ranks(2).run("promises.compiled", name=schedule)) <= EXACT


def test_replicas_of_a_pipe_are_averaged_by_distributed_data_parallel(ranks):
    assert max(ranks(2).run("promises.replicas", name="ScheduleInterleaved1F1B")) <= EXACT
    assert max(ranks(2).run("promises.replicas", name="ScheduleInterleavedZeroBubble")) <= EXACT


def test_schedules_can_take_turns_with_the_same_stages(ranks):
    assert max(ranks(2).run("promises.two_schedules")) <= EXACT


def test_a_stage_that_is_not_there_is_refused(ranks):
    for said in ranks(2).run("promises.wrong_stage"):
        assert len(said) == 4
        assert all("stages 0 to 1" in text for text in said)
