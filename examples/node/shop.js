// A shop that sells orders: each one is paid and announced, or neither.
//
//   node shop.js CENTERS KEY POSTGRESQL_URL CHECKS ORDERS
//
// CENTERS: addresses of the center's servers, IP:PORT,IP:PORT.  CHECKS: host:port where it answers the center.
"use strict";
const { randomBytes, timingSafeEqual } = require("node:crypto");
const path = require("node:path");
const { setTimeout: pause } = require("node:timers/promises");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const { Pool } = require("pg");
const { Ledger, inTransaction } = require("./ledger");

const definition = loader.loadSync(["tmc/v1/message.proto", "tmc/v1/check.proto"], {
  includeDirs: [path.join(__dirname, "../../protos")], keepCase: true, longs: String, enums: String, defaults: true,
});
const { tmc } = grpc.loadPackageDefinition(definition);
const PASSING = [grpc.status.UNAVAILABLE, grpc.status.DEADLINE_EXCEEDED, grpc.status.ABORTED, grpc.status.RESOURCE_EXHAUSTED];

class Center {
  constructor(addresses, key, checks, ledgerId) {
    const inTurn = { "grpc.service_config": '{"loadBalancingConfig": [{"round_robin": {}}]}' }; // after UNAVAILABLE, another server
    this.stub = new tmc.v1.MessageService(`ipv4:${addresses}`, grpc.credentials.createInsecure(), inTurn);
    this.metadata = new grpc.Metadata();
    const said = { "tmc-app": "orders", authorization: `Bearer ${key}`, "tmc-check-address": checks, "tmc-check-ledger": ledgerId.toString("hex") };
    for (const [name, value] of Object.entries(said)) this.metadata.set(name, value);
  }

  // Repeats the same call until its answer stays. Throws: it is refused. A RetryInfo in the details says when to repeat it: decode it.
  async call(method, request) {
    for (let wait = 50; ; wait = Math.min(2 * wait, 2000)) {
      try {
        return await new Promise((resolve, reject) => {
          const answered = (error, response) => (error ? reject(error) : resolve(response));
          this.stub[method](request, this.metadata, { deadline: Date.now() + 10_000 }, answered);
        });
      } catch (error) {
        if (!PASSING.includes(error.code)) throw error;
        await pause(wait);
      }
    }
  }
}

// Returns whether the center refused a call for this reason. It is text in a google.rpc.Status: with its proto, decode that instead.
function hasReason(error, reason) {
  return error.metadata?.get("grpc-status-details-bin").some((details) => details.includes(reason)) ?? false;
}

class Cancelled extends Error {}

class Shop {
  constructor(pool, ledger, center) {
    Object.assign(this, { pool, ledger, center });
  }

  // The customer of every ninth order changes their mind.
  async sell(number) {
    const message = { topic: "order.paid", key: String(number), body: Buffer.from(String(number)), content_type: "text/plain" };
    Object.assign(message, { attempt_id: randomBytes(16), ledger_id: this.ledger.id });
    const { message_id } = await this.center.call("Prepare", message);
    try {
      await inTransaction(this.pool, async (connection) => {
        await connection.query("INSERT INTO orders VALUES ($1)", [String(number)]);
        if (number % 9 === 0) throw new Cancelled();
        await this.ledger.record(connection, message_id, message);
      });
    } catch (error) {
      if (error instanceof Cancelled) return this.center.call("Rollback", { message_id });
      throw error; // whether it committed or not, the center asks us
    }
    await this.submit(message_id);
  }

  async submit(messageId) {
    try {
      await this.center.call("Submit", { message_id: messageId });
    } catch (error) {
      if (!hasReason(error, "MESSAGE_GONE")) throw error; // it was delivered, and removed since
    }
    await this.ledger.settle(messageId);
  }

  async isSold(number) {
    return (await this.pool.query("SELECT 1 FROM orders WHERE name = $1", [String(number)])).rowCount > 0;
  }
}

// Answers checks to callers with the app's token, which it asks for again when it sees another one. The one before is taken for
// another minute: servers learn of a rotation one by one.
function answerChecks(ledger, center, address) {
  const known = { now: "", previous: "", asked: 0, rotated: 0 };
  const same = (token, shown) => token.length === shown.length && timingSafeEqual(Buffer.from(token), Buffer.from(shown));
  const isRight = (shown) =>
    shown !== "" && (same(known.now, shown) || (same(known.previous, shown) && Date.now() - known.rotated < 60_000));
  const allow = async (shown) => {
    if (!isRight(shown) && Date.now() - known.asked > 5_000) {
      known.asked = Date.now();
      const { check_token } = await center.call("DescribeChecks", {});
      if (check_token !== known.now) Object.assign(known, { now: check_token, previous: known.now, rotated: Date.now() });
    }
    return isRight(shown);
  };
  const server = new grpc.Server();
  server.addService(tmc.v1.CheckService.service, {
    CheckMany: async (call, answer) => {
      try {
        if (!(await allow(String(call.metadata.get("tmc-check-token")[0] ?? "")))) {
          return answer({ code: grpc.status.PERMISSION_DENIED, details: "This is not the check token of the app." });
        }
        const results = [];
        for (const question of call.request.items) results.push(await ledger.answer(question));
        return answer(null, { results });
      } catch (error) {
        return answer({ code: grpc.status.UNAVAILABLE, details: String(error.message) });
      }
    },
  });
  return new Promise((resolve, reject) => {
    server.bindAsync(address, grpc.ServerCredentials.createInsecure(), (error) => (error ? reject(error) : resolve(server)));
  });
}

async function main(addresses, key, database, checks, orders) {
  const pool = new Pool({ connectionString: database, max: 16 });
  pool.on("error", () => {}); // an idle connection was lost: the next one is new
  await pool.query("CREATE TABLE IF NOT EXISTS orders (name VARCHAR(20) PRIMARY KEY)");
  const ledger = await Ledger.open(pool);
  const center = new Center(addresses, key, checks, ledger.id);
  const server = await answerChecks(ledger, center, checks);
  process.on("SIGTERM", () => server.tryShutdown(() => pool.end().then(() => process.exit(0))));
  const shop = new Shop(pool, ledger, center);
  for (const messageId of await ledger.unsettled()) { // what an earlier process did not get to
    await shop.submit(messageId).catch((error) => console.error(`look at the ledger row of ${messageId}: ${error.message}`));
  }
  let next = 0;
  const seller = async () => {
    for (let number = next++; number < orders; number = next++) {
      for (;;) {
        try {
          if (!(await shop.isSold(number))) await shop.sell(number);
          break;
        } catch (error) {
          console.error(`order ${number} is sold again: ${error.message}`);
          await pause(20);
        }
      }
    }
  };
  await Promise.all(Array.from({ length: 8 }, seller));
  console.log("all is sold");
}

const [addresses, key, database, checks, orders] = process.argv.slice(2);
main(addresses, key, database, checks, Number(orders)).catch((error) => {
  console.error(error);
  process.exit(1);
});
