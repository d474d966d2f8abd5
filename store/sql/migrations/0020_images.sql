-- Images of calls: each file once, by its digest, and who refers to it. A prune removes those that
-- nothing refers to.

create table images (
    digest text primary key,            -- sha256 of the body, hexadecimal
    media_type text not null,
    width integer not null,
    height integer not null,
    put_at real not null,               -- the last time; its call may still be in flight
    body blob not null
) strict;

create table rollout_images (
    rollout_id text not null,
    digest text not null references images (digest),
    primary key (rollout_id, digest)
) strict, without rowid;

create index rollout_images_by_digest on rollout_images (digest);

create table side_images (
    side text not null,                 -- sides.digest, of a side with its own calls
    digest text not null references images (digest),
    primary key (side, digest)
) strict, without rowid;

create index side_images_by_digest on side_images (digest);

alter table transitions add column images blob;  -- digests in order, 32 bytes each; null: none
