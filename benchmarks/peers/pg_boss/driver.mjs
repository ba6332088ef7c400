// pg-boss: batches, several local workers, LISTEN/NOTIFY, and no rest while batches come back full.
// A batch completes with one statement and fails as a whole: its fastest way. The variant gives a result for each job.

import pg from "pg";
import { PgBoss } from "pg-boss";

import { connectionOf, main, payloadOf } from "./common.mjs";

const QUEUE = "bench";
const WORKERS = 4;

const bossOf = (task, options = {}) => {
  const boss = new PgBoss({ ...connectionOf(task.dsn), ...options });
  boss.on("error", (error) => console.error(String(error)));
  return boss;
};

// As many jobs at once as are asked for, shared by the workers.
const batchOf = (task) =>
  task.handler === "io" ? Math.ceil(task.concurrency / WORKERS) : task.batch;

await main({
  settings(task) {
    if (task.action === "work") {
      const results = task.options.each ? "perJobResults" : "one result for a batch";
      return `batchSize=${batchOf(task)}, localConcurrency=${WORKERS}, burstWhenBatchFull, useListenNotify, ${results}, rows kept`;
    }
    return "send; many: insert";
  },

  async setup(task) {
    const boss = bossOf(task, { supervise: false, schedule: false });
    await boss.start();
    await boss.createQueue(QUEUE, { notify: true });
    await boss.stop({ graceful: false });
  },

  async producer(task) {
    const boss = bossOf(task, { supervise: false, schedule: false, max: 1 });
    await boss.start();
    return {
      one: (number) => boss.send(QUEUE, payloadOf(number, task.payload)),
      many: (numbers) => boss.insert(QUEUE, numbers.map((number) => ({ data: payloadOf(number, task.payload) }))),
      close: () => boss.stop({ graceful: false }),
    };
  },

  async work(task, run) {
    const boss = bossOf(task, { useListenNotify: true });
    const watching = new pg.Pool({ ...connectionOf(task.dsn), max: 1 });
    await boss.start();
    await boss.work(
      QUEUE,
      {
        batchSize: batchOf(task),
        localConcurrency: WORKERS,
        burstWhenBatchFull: true,
        pollingIntervalSeconds: 0.5,
        perJobResults: Boolean(task.options.each),
      },
      async (jobs) => {
        await Promise.all(jobs.map((job) => run.handle(job.data)));
        return task.options.each ? jobs.map(({ id }) => ({ id, status: "completed" })) : undefined;
      },
    );
    await run.untilOver(async () => {
      const { rows } = await watching.query(
        "select exists (select 1 from pgboss.job where state in ('created', 'retry', 'active')) as left",
      );
      return rows[0].left;
    });
    await boss.stop({ graceful: false });
  },
});
