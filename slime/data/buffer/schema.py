"""SQL schema of the journal.

Invariants: plain SQL is enough to find a sample, its text, its reward and its state. `FORMAT` changes with every change
of the schema or the payload; the table `identity` is written once, when the file is created.
"""

from __future__ import annotations

FORMAT = 4
APPLICATION_ID = 0x736C6D65  # "slme": distinguishes a journal from other SQLite databases

OPEN = ("pending", "partial", "finished")
"""States of a group that was handed out but is not in a batch: after a crash it returns to the data source."""
STATES = (*OPEN, "assigned", "consumed", "dropped")
NOT_CONSUMED = tuple(state for state in STATES if state != "consumed")

RECORD = """
CREATE TABLE identity (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE groups (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    group_index INTEGER,
    state TEXT NOT NULL CHECK (state IN ('pending', 'partial', 'finished', 'assigned', 'consumed', 'dropped')),
    rollout_id INTEGER,
    position INTEGER,
    consumed_by INTEGER
);
CREATE INDEX groups_by_state ON groups (state);
CREATE INDEX groups_by_rollout ON groups (rollout_id, position) WHERE rollout_id IS NOT NULL;
CREATE TABLE samples (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    group_id INTEGER NOT NULL REFERENCES groups (id),
    member INTEGER,
    leaf INTEGER,
    sample_index INTEGER,
    status TEXT NOT NULL,
    reward REAL,
    response_length INTEGER,
    weight_versions TEXT NOT NULL,
    prompt TEXT NOT NULL,
    response TEXT NOT NULL,
    payload BLOB NOT NULL
);
CREATE INDEX samples_by_group ON samples (group_id);
CREATE TABLE rollouts (
    rollout_id INTEGER PRIMARY KEY,
    state TEXT NOT NULL CHECK (state IN ('assigned', 'consumed')),
    metrics TEXT NOT NULL
);
CREATE TABLE positions (rollout_id INTEGER PRIMARY KEY, position TEXT NOT NULL);
CREATE VIEW trajectories AS
    SELECT samples.id, sample_index, group_index, state, rollout_id, consumed_by, status, reward, response_length,
           weight_versions, prompt, response
    FROM samples JOIN groups ON groups.id = samples.group_id;
CREATE VIEW finished AS
    SELECT * FROM trajectories WHERE state IN ('finished', 'assigned', 'consumed');
"""

TO_LOOK_AT = """
CREATE TABLE kept (rollout_id INTEGER PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    dataset TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    UNIQUE (step, dataset)
);
CREATE TABLE evaluated_samples (
    id INTEGER PRIMARY KEY,
    evaluation_id INTEGER NOT NULL REFERENCES evaluations (id),
    sample_index INTEGER,
    status TEXT NOT NULL,
    reward REAL,
    response_length INTEGER,
    weight_versions TEXT NOT NULL,
    prompt TEXT NOT NULL,
    response TEXT NOT NULL,
    payload BLOB NOT NULL
);
CREATE INDEX evaluated_samples_by_evaluation ON evaluated_samples (evaluation_id);
CREATE VIEW evaluated AS
    SELECT evaluated_samples.id, step, dataset, sample_index, status, reward, response_length, weight_versions, prompt,
           response
    FROM evaluated_samples JOIN evaluations ON evaluations.id = evaluation_id;
"""
"""Added in format 2: the retained consumed rollouts, and the completions of evaluations."""

# Format 3 adds the sample status `generated`; its tables are those of format 2.

REFERRED = """
CREATE TABLE referred (
    checkpoint INTEGER NOT NULL,
    group_id INTEGER NOT NULL,
    PRIMARY KEY (checkpoint, group_id)
) WITHOUT ROWID;
CREATE INDEX referred_by_group ON referred (group_id);
"""
"""Added in format 4: the buffered groups that the data position of a checkpoint refers to."""

SCHEMA = RECORD + TO_LOOK_AT + REFERRED
