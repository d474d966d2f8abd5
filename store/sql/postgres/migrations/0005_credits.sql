-- Credit of the calls that a step trained, and groups that a step discarded.

create table credits (
    transition bigint not null references transitions (seq),
    policy text collate "C" not null,
    step bigint not null,
    advantage bytea not null,            -- float32: one number for each token, or one for all
    baseline bytea not null,             -- of each comparison after the other
    gate bytea not null,
    weight bytea not null,
    psi bytea not null,
    primary key (transition, policy)
);

alter table runs add column groups_discarded bigint not null default 0;
