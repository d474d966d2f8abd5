-- Images of calls: each file once, by its digest, and who refers to it. A prune removes those that
-- nothing refers to.

create table images (
    digest text collate "C" primary key,            -- sha256 of the body, hexadecimal
    media_type text not null,
    width bigint not null,
    height bigint not null,
    put_at double precision not null,   -- the last time; its call may still be in flight
    body bytea not null
);

create table rollout_images (
    rollout_id text collate "C" not null,
    digest text collate "C" not null references images (digest),
    primary key (rollout_id, digest)
);

create index rollout_images_by_digest on rollout_images (digest);

create table side_images (
    side text collate "C" not null,                 -- sides.digest, of a side with its own calls
    digest text collate "C" not null references images (digest),
    primary key (side, digest)
);

create index side_images_by_digest on side_images (digest);

alter table transitions add column images bytea;  -- digests in order, 32 bytes each; null: none
