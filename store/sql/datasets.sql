-- name: lock_datasets
select null;  -- not needed: there is only one writer

-- name: last_version
select version, spec, digest from datasets where name = ? order by version desc limit 1;

-- name: add_dataset
insert into datasets (name, version, spec, created_at) values (:name, :version, :spec, :now)
on conflict (name, version) do nothing;

-- name: delete_items
delete from items where dataset = :name and version = :version;

-- name: delete_dataset
delete from datasets where name = :name and version = :version;

-- name: delete_sides
delete from sides where not exists (
    select 1 from items where chosen = sides.digest or rejected = sides.digest
);

-- name: delete_side_images
delete from side_images where not exists (select 1 from sides where digest = side);

-- A side that refers to a rollout becomes a copy if its calls are given.
-- name: add_side
insert into sides (digest, rollout_id, first_call, calls, own)
values (:digest, :rollout, :first, :calls, :own)
on conflict (digest) do update set own = coalesce(sides.own, excluded.own);

-- name: references
select digest from sides
where own is null and rollout_id in (select value from json_each(?));

-- name: own_side
update sides set own = :own where digest = :digest;

-- name: add_item
insert into items (
    dataset, version, position, id, kind, chosen, rejected, label, steps, margin, weight, split,
    source
) values (
    :dataset, :version, :position, :id, :kind, :chosen, :rejected, :label, :steps, :margin, :weight,
    :split, :source
)
on conflict do nothing;

-- name: lost_side
select i.id from items i
left join sides s on s.digest = i.chosen left join sides r on r.digest = i.rejected
where i.dataset = :name and i.version = :version
  and (s.digest is null or (i.rejected is not null and r.digest is null))
limit 1;

-- name: ids
select id from items where dataset = :name and version = :version order by position;

-- name: commit_dataset
update datasets set digest = :digest where name = :name and version = :version;

-- name: datasets
select d.*, (
    select count(*) from items i where i.dataset = d.name and i.version = d.version
) as items
from datasets d where d.name = coalesce(:name, d.name) order by d.name, d.version;

-- name: items
select * from items
where dataset = :name and version = :version and split = coalesce(:split, split)
  and position > :after
order by position limit :limit;

-- name: sides
select * from sides where digest in (select value from json_each(?));

-- name: attempts
select id, attempt_id from rollouts where id in (select value from json_each(?));

-- name: add_judgement
insert into judgements (id, subject, judge, verdict, reason, raw, cost, seconds, at)
values (:id, :subject, :judge, :verdict, :reason, :raw, :cost, :seconds, :now)
on conflict (id) do nothing;

-- name: judgement
select * from judgements where id = ?;

-- name: add_logprobs
insert into logprobs (model, side, logprobs) values (?, ?, ?) on conflict (model, side) do nothing;

-- name: logprobs
select side, logprobs from logprobs
where model = :model and side in (select value from json_each(:sides));
