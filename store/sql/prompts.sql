-- name: put_candidate
insert into candidates (run_id, id, step, parents, state, texts, reflection)
values (:run, :id, :step, :parents, :state, :texts, :reflection)
on conflict (run_id, id) do update set state = excluded.state;

-- name: candidate
select texts from candidates where run_id = ? and id = ?;

-- name: candidates
select * from candidates where run_id = ? order by seq;

-- name: add_reflection
insert into reflections (
    id, run_id, step, question, answer, prompt_tokens, completion_tokens, seconds
) values (
    :id, :run, :step, :question, :answer, :prompt_tokens, :completion_tokens, :seconds
)
on conflict (id) do nothing;

-- name: reflections
select * from reflections where run_id = ? order by seq;
