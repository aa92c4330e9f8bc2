// The ledger of a service, as docs/wire.md describes it: PostgreSQL knows which messages belong to committed transactions.
"use strict";
const { randomBytes } = require("node:crypto");

const COMMITTED = 1;
const ROLLED_BACK = 2;
const CLOCKS_APART_MS = 3_600_000n; // messages are dated by the center's clock, cleaning by ours

const TABLES = `
CREATE TABLE IF NOT EXISTS tmc_ledger (
    message_id VARCHAR(64) NOT NULL, state SMALLINT NOT NULL, topic VARCHAR(128) NOT NULL, message_key VARCHAR(128) NOT NULL,
    attempt_id BYTEA NOT NULL, created_ms BIGINT NOT NULL, settled_ms BIGINT, PRIMARY KEY (message_id)
);
CREATE INDEX IF NOT EXISTS tmc_ledger_unsettled ON tmc_ledger (settled_ms, message_id);
CREATE TABLE IF NOT EXISTS tmc_ledger_info (
    id INTEGER NOT NULL, ledger_id BYTEA NOT NULL, horizon_ms BIGINT DEFAULT '0' NOT NULL, PRIMARY KEY (id)
);`;

const INSERT = `INSERT INTO tmc_ledger (message_id, state, topic, message_key, attempt_id, created_ms, settled_ms)
    VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING`;

class Fenced extends Error {}

class Ledger {
  static async open(pool) {
    await pool.query(TABLES);
    await pool.query("INSERT INTO tmc_ledger_info (id, ledger_id) VALUES (1, $1) ON CONFLICT DO NOTHING", [randomBytes(16)]);
    const { rows } = await pool.query("SELECT ledger_id FROM tmc_ledger_info");
    return new Ledger(pool, rows[0].ledger_id);
  }

  constructor(pool, id) {
    this.pool = pool;
    this.id = id;
  }

  // Part of the local transaction of a message. Throws Fenced: a check was answered with ROLLBACK meanwhile.
  async record(connection, messageId, message) {
    const row = [messageId, COMMITTED, message.topic, message.key, message.attempt_id, Date.now(), null];
    if ((await connection.query(INSERT, row)).rowCount === 0) throw new Fenced(messageId);
  }

  async settle(messageId) {
    await this.pool.query("UPDATE tmc_ledger SET settled_ms = $1 WHERE message_id = $2", [Date.now(), messageId]);
  }

  // What was committed and, as far as is known here, not submitted.
  async unsettled() {
    const query = "SELECT message_id FROM tmc_ledger WHERE settled_ms IS NULL AND state = $1";
    return (await this.pool.query(query, [COMMITTED])).rows.map((row) => row.message_id);
  }

  // Answers one question of the center.
  async answer(question) {
    const unknown = (unknown_reason, detail) => ({ message_id: question.message_id, verdict: "VERDICT_UNKNOWN", unknown_reason, detail });
    const byState = (state) => {
      const verdict = { [COMMITTED]: "VERDICT_COMMIT", [ROLLED_BACK]: "VERDICT_ROLLBACK" }[state];
      return verdict ? { message_id: question.message_id, verdict } : unknown("UNKNOWN_REASON_NOT_NOW", `the row has the state ${state}`);
    };
    if (!this.id.equals(question.ledger_id)) return unknown("UNKNOWN_REASON_WRONG_LEDGER", "prepared with another ledger");
    try {
      const state = await this.#state(question.message_id);
      if (state !== undefined) return byState(state);
      const { rows } = await this.pool.query("SELECT horizon_ms FROM tmc_ledger_info");
      const horizon = BigInt(rows[0].horizon_ms);
      if (horizon !== 0n && horizon > BigInt(question.created_ms) - CLOCKS_APART_MS) {
        return unknown("UNKNOWN_REASON_UNSPECIFIED", "the ledger was cleaned since, so its row may be gone");
      }
      return byState((await this.#fence(question)) ? ROLLED_BACK : await this.#state(question.message_id));
    } catch (error) {
      return unknown("UNKNOWN_REASON_NOT_NOW", String(error.message).slice(0, 500));
    }
  }

  async #state(messageId) {
    const { rows } = await this.pool.query("SELECT state FROM tmc_ledger WHERE message_id = $1", [messageId]);
    return rows[0]?.state;
  }

  // After this row, a transaction that is still open cannot commit. Returns false: there is a row already.
  async #fence(question) {
    const { message_id, topic, key, attempt_id } = question;
    const now = Date.now();
    return inTransaction(this.pool, async (connection) => {
      await connection.query("SET LOCAL lock_timeout = '100ms'"); // it must not wait for that transaction
      return (await connection.query(INSERT, [message_id, ROLLED_BACK, topic, key, attempt_id, now, now])).rowCount === 1;
    });
  }
}

async function inTransaction(pool, work) {
  const connection = await pool.connect();
  let failure;
  const lose = (error) => { failure = error; };
  connection.on("error", lose); // else a lost connection ends the process
  try {
    await connection.query("BEGIN");
    const result = await work(connection);
    await connection.query("COMMIT");
    return result;
  } catch (error) {
    failure = error;
    throw error;
  } finally {
    if (failure) await connection.query("ROLLBACK").catch(lose);
    connection.off("error", lose);
    connection.release(failure);
  }
}

module.exports = { Ledger, Fenced, inTransaction };
