"""Stopping groups, going on with them, and that no request is ever lost or answered twice."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from vcpo.types import Trajectory


def step(engine, times):
    results = []
    for _ in range(times):
        results += engine.step()
    return results


def test_going_on_after_an_abort_gives_what_would_have_come_without_it(tiny_model, make_engine, make_request, drain):
    model = tiny_model()
    through = make_engine(model)
    through.submit([make_request(0, n=6)])
    want = drain(through)[0]
    engine = make_engine(model)
    engine.submit([make_request(0, n=6), make_request(1)])
    assert step(engine, 3) == []
    (request,) = engine.abort([0, 17])
    written = {t.member: t for t in request.partial}
    assert any(t.finish_reason == "aborted" for t in written.values())
    assert any(t.finish_reason == "stop" for t in written.values()), "the example needs a member that ended before"
    for member, t in written.items():
        assert t.token_ids == want.trajectories[member].token_ids[: len(t.token_ids)]
    assert engine.num_active == 3
    engine.submit([request, make_request(2, [3, 4, 5, 6, 7, 8, 9])])
    got = drain(engine)
    assert set(got) == {0, 1, 2}
    for a, b in zip(got[0].trajectories, want.trajectories, strict=True):
        assert a.token_ids == b.token_ids
        assert a.finish_reason == b.finish_reason
        torch.testing.assert_close(torch.tensor(a.sampler_logprobs), torch.tensor(b.sampler_logprobs))


def test_a_request_that_was_not_started_comes_back_as_it_was(tiny_model, make_engine, make_request):
    engine = make_engine(tiny_model())
    request = make_request(3)
    engine.submit([request])
    assert engine.abort([3]) == [request]
    assert engine.num_active == 0
    assert engine.step() == []
    assert engine.started() == []


def test_a_group_whose_members_are_all_there_is_a_result_at_once(tiny_model, make_engine, make_request):
    members = tuple(
        Trajectory(
            member=m, token_ids=(4, 2), sampler_logprobs=(-1.0, -0.5), policy_versions=(1, 2), finish_reason="stop"
        )
        for m in range(3)
    )
    request = make_request(0)
    engine = make_engine(tiny_model(), policy_version=5)
    engine.submit([replace(request, partial=members)])
    (result,) = engine.step()
    assert result.trajectories == members
    assert (result.started_version, result.completed_version) == (1, 5)
    assert engine.started() == [(0, 1)]
    assert engine.num_active == 0


def test_missing_members_are_written_beside_the_kept_ones(tiny_model, make_engine, make_request, drain):
    model = tiny_model()
    engine = make_engine(model)
    engine.submit([make_request(0, n=4)])
    want = drain(engine)[0]
    kept = (want.trajectories[1], want.trajectories[3])
    request = make_request(0, n=4)
    again = make_engine(model)
    again.submit([replace(request, partial=kept)])
    assert [t.token_ids for t in drain(again)[0].trajectories] == [t.token_ids for t in want.trajectories]


def test_a_member_aborted_at_the_last_token_is_not_written_further(tiny_model, make_engine, make_request, drain):
    engine = make_engine(tiny_model(), stop_token_ids=(), max_new_tokens=4)
    full = Trajectory(
        member=1,
        token_ids=(3, 4, 5, 6),
        sampler_logprobs=(-1.0,) * 4,
        policy_versions=(0,) * 4,
        finish_reason="aborted",
    )
    request = make_request(0, n=2)
    engine.submit([replace(request, partial=(full,))])
    result = drain(engine)[0]
    assert [len(t.token_ids) for t in result.trajectories] == [4, 4]
    assert result.trajectories[1].token_ids == (3, 4, 5, 6)
    assert result.trajectories[1].finish_reason == "length"


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 3)),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("abort"), st.integers(0, 10)),
        st.tuples(st.just("resubmit"), st.booleans()),
        st.tuples(st.just("weights"), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=25, deadline=None)
@given(actions=ACTIONS)
def test_requests_are_conserved_and_lengths_versions_logprobs_stay_together(
    actions, tiny_model, make_engine, make_request, drain
):
    """submitted = completed + aborted and not resubmitted + in flight, after every action; every result is whole."""
    engine = make_engine(tiny_model(dtype=torch.float32), max_new_tokens=9)
    submitted, completed, set_aside, in_flight = set(), {}, {}, {}
    for kind, value in [*actions, ("resubmit", True), ("step", 200)]:
        if kind == "submit":
            new = [make_request(len(submitted) + i) for i in range(value)]
            submitted |= {r.group_id for r in new}
            in_flight |= {r.group_id: r for r in new}
            engine.submit(new)
        elif kind == "step":
            for result in step(engine, value):
                assert result.group_id not in completed
                completed[result.group_id] = result
                del in_flight[result.group_id]
        elif kind == "abort":
            wanted = {g for g in submitted if g % 11 <= value}
            back = {r.group_id: r for r in engine.abort(wanted)}
            assert set(back) == wanted & set(in_flight)
            for group_id, request in back.items():
                set_aside[group_id] = request
                del in_flight[group_id]
        elif kind == "resubmit":
            requests = [r if value else r.from_prompt() for r in set_aside.values()]
            in_flight |= {r.group_id: r for r in requests}
            set_aside = {}
            engine.submit(requests)
        else:
            engine.policy_version += 1
        assert engine.num_active == 3 * len(in_flight)
        assert submitted == set(completed) | set(in_flight) | set(set_aside)
    assert not in_flight
    for result in completed.values():
        assert [t.member for t in result.trajectories] == [0, 1, 2]
        for t in result.trajectories:
            assert 1 <= len(t.token_ids) == len(t.sampler_logprobs) == len(t.policy_versions) <= 9
            assert list(t.policy_versions) == sorted(t.policy_versions)
            assert result.started_version <= t.policy_versions[0]
            assert t.policy_versions[-1] <= result.completed_version
            assert t.finish_reason == ("stop" if t.token_ids[-1] == 2 else "length")


def test_a_row_that_ended_early_in_a_large_batch_does_not_run_past_its_room(make_engine, make_request, drain):
    """It stays in the batch until an eighth of it has ended: past its last token, and past the model's last position."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=13, n_embd=8, n_layer=1, n_head=2, n_positions=14)
    model = GPT2LMHeadModel(config).double().eval()
    alone = make_engine(model, stop_token_ids=())
    alone.submit([make_request(1, [3, 4], n=30)])
    want = drain(alone)[1]
    engine = make_engine(model, stop_token_ids=())
    engine.submit([make_request(0, [3, 4], n=1)])
    step(engine, 8)
    engine.submit([make_request(1, [3, 4], n=30)])
    engine.step()
    engine.abort([0])
    got = drain(engine)[1]
    assert [t.token_ids for t in got.trajectories] == [t.token_ids for t in want.trajectories]
