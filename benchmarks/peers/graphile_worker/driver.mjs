// graphile-worker: the batching of its page on performance (local queue of 500, completions batched without delay).
// It deletes what has completed; there is no other way.

import { Logger, makeWorkerUtils, run as startRunner } from "graphile-worker";
import pg from "pg";

import { connectionOf, main, payloadOf } from "./common.mjs";

const quiet = new Logger(() => () => {});
const poolOf = (task, max) => new pg.Pool({ ...connectionOf(task.dsn), max });

const concurrencyOf = (task) => (task.handler === "io" ? task.concurrency : 24);

await main({
  settings(task) {
    if (task.action === "work")
      return `concurrentJobs=${concurrencyOf(task)}, localQueue.size=${task.batch}, completeJobBatchDelay=0, rows deleted`;
    return "addJob; many: addJobs";
  },

  async setup(task) {
    const pgPool = poolOf(task, 2);
    const utils = await makeWorkerUtils({ pgPool, logger: quiet });
    await utils.migrate();
    await utils.release();
    await pgPool.end();
  },

  async producer(task) {
    const pgPool = poolOf(task, 1);
    const utils = await makeWorkerUtils({ pgPool, logger: quiet });
    const spec = (number) => ({ identifier: "bench", payload: payloadOf(number, task.payload) });
    return {
      one: (number) => utils.addJob("bench", payloadOf(number, task.payload)),
      many: (numbers) => utils.addJobs(numbers.map(spec)),
      async close() {
        await utils.release();
        await pgPool.end();
      },
    };
  },

  async work(task, run) {
    const pgPool = poolOf(task, 12);
    const watching = poolOf(task, 1);
    const runner = await startRunner({
      pgPool,
      logger: quiet,
      noHandleSignals: true,
      taskList: { bench: (payload) => run.handle(payload) },
      preset: {
        worker: {
          concurrentJobs: concurrencyOf(task),
          localQueue: { size: task.batch },
          completeJobBatchDelay: 0,
          failJobBatchDelay: 0,
        },
      },
    });
    await run.untilOver(async () => {
      const { rows } = await watching.query("select exists (select 1 from graphile_worker._private_jobs) as left");
      return rows[0].left;
    });
    await runner.stop();
  },
});
