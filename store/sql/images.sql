-- name: put_image
insert into images (digest, media_type, width, height, put_at, body)
values (:digest, :media_type, :width, :height, :now, :body)
on conflict (digest) do update set put_at = excluded.put_at;

-- name: images
select digest, media_type, width, height, body from images
where digest in (select value from json_each(:digests));

-- name: stored
select digest from images where digest in (select value from json_each(:digests));

-- The owner is one of the rollout's attempts.
-- name: refer_rollout
insert into rollout_images (rollout_id, digest)
select a.rollout_id, i.digest from attempts a cross join images i
where a.id = :owner and i.digest in (select value from json_each(:digests))
on conflict (rollout_id, digest) do nothing;

-- name: refer_side
insert into side_images (side, digest)
select :owner, i.digest from images i
where i.digest in (select value from json_each(:digests))
on conflict (side, digest) do nothing;

-- To which nothing refers but the rollouts of a list.
-- name: unused
select i.digest, length(i.body) as bytes from images i
where i.put_at <= :before
  and not exists (
    select 1 from rollout_images r
    where r.digest = i.digest and not (r.rollout_id in (select value from json_each(:without)))
  )
  and not exists (select 1 from side_images s where s.digest = i.digest)
limit :n;

-- Prevents references to images that are being deleted. Not needed here: there is only one writer.
-- name: lock_references
select 1;

-- name: delete_images
delete from images where digest in (select value from json_each(:digests));
