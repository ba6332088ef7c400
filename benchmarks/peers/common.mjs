// What the drivers written for Node share; the protocol is told at the top of benchmarks/driver.py.

import { randomBytes } from "node:crypto";
import { createInterface } from "node:readline";

const MARKS = 400;

/** Seconds of CLOCK_MONOTONIC, as Python's time.monotonic gives them. */
export const now = () => Number(process.hrtime.bigint()) / 1e9;

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export const say = (event, fields = {}) => process.stdout.write(JSON.stringify({ event, ...fields }) + "\n");

/** The DSN as node-postgres wants it: the socket's folder as the host. */
export function connectionOf(dsn) {
  const url = new URL(dsn.replace("@/", "@localhost/"));
  return {
    user: url.username,
    database: url.pathname.slice(1),
    host: url.searchParams.get("host") ?? url.hostname,
    port: Number(url.searchParams.get("port") ?? url.port),
  };
}

let padding = "";

export function payloadOf(number, size) {
  const length = size - 12 - String(number).length;
  if (length < 6) return { n: number };
  // Text that does not compress.
  if (padding.length < length) padding = randomBytes(size).toString("base64");
  return { n: number, pad: padding.slice(0, length) };
}

/** A worker's run: counts what its handler has seen, and knows when it is over. */
export class Run {
  constructor(task, lines) {
    this.task = task;
    this.count = 0;
    this.marks = [];
    this.starts = [];
    this.complete = false;
    this.step = Math.max(1, Math.floor(task.count / MARKS));
    this.next = 1;
    this.over = new Promise((resolve) => {
      this.end = resolve;
      lines.once("line", resolve); // `stop`
      lines.once("close", resolve); // the harness is gone
      setTimeout(resolve, task.seconds * 1000).unref();
    });
  }

  tick() {
    this.count += 1;
    if (this.count < this.next) return;
    this.marks.push([this.count, now()]);
    this.next += this.step;
    if (this.count >= this.task.count) {
      this.next = Infinity;
      this.end();
    } else if (this.next > this.task.count) {
      this.next = this.task.count;
    }
  }

  /** One job of the task's kind. */
  handle(data) {
    switch (this.task.handler) {
      case "record":
        this.starts.push([data.n, now()]);
        this.tick();
        return undefined;
      case "io":
        return sleep(this.task.io * 1000).then(() => this.tick());
      default:
        this.tick();
        return undefined;
    }
  }

  /** Waits for the last job, and then until its result is durable: while `unsettled` says so. */
  async untilOver(unsettled) {
    await this.over;
    if (this.count >= this.task.count) {
      const deadline = now() + 60;
      while ((await unsettled()) && now() < deadline) await sleep(2);
      this.complete = now() < deadline;
    }
    const { count, complete, marks, starts } = this;
    say("done", { count, complete, marks, starts, ended: now() });
  }
}

async function paced(producer, task, commits) {
  const together = Math.max(1, Math.round(task.rate / 100));
  const gap = together / task.rate;
  let due = now();
  const limit = due + task.seconds;
  for (let start = 0; start < task.count; start += together) {
    const numbers = range(task.first + start, Math.min(together, task.count - start));
    due += gap * (0.5 + Math.random());
    const wait = due - now();
    if (wait > 0) await sleep(wait * 1000);
    if (together === 1) await producer.one(numbers[0]);
    else await producer.many(numbers);
    const committed = now();
    for (const number of numbers) commits.push([number, committed]);
    if (committed > limit) break;
  }
  return commits.length;
}

const range = (first, count) => Array.from({ length: count }, (_, place) => first + place);

async function enqueue(producer, task) {
  const times = [];
  const commits = [];
  let count = 0;
  const started = now();
  const limit = started + task.seconds;
  if (task.mode === "single") {
    for (const number of range(task.first, task.count)) {
      const before = now();
      await producer.one(number);
      const after = now();
      times.push(after - before);
      count += 1;
      if (after > limit) break;
    }
  } else if (task.mode === "bulk") {
    for (let start = 0; start < task.count; start += task.batch) {
      const numbers = range(task.first + start, Math.min(task.batch, task.count - start));
      await producer.many(numbers);
      count += numbers.length;
      if (now() > limit) break;
    }
  } else {
    count = await paced(producer, task, commits);
  }
  say("done", { count, started, ended: now(), times, commits });
}

/** Does the task that the command line gives. */
export async function main(driver) {
  const task = JSON.parse(process.argv[2]);
  say("ready", { settings: driver.settings(task) });
  const lines = createInterface({ input: process.stdin });
  const word = await new Promise((resolve) => {
    lines.once("line", resolve);
    lines.once("close", resolve);
  });
  if (word !== "go") process.exit(0);
  if (task.action === "setup") {
    await driver.setup(task);
    say("done");
  } else if (task.action === "work") {
    await driver.work(task, new Run(task, lines));
  } else {
    const producer = await driver.producer(task);
    await enqueue(producer, task);
    await producer.close();
  }
  // Not at once: what a pipe has not taken yet would be lost, and a long report would end in the middle.
  process.stdout.write("", () => process.exit(0));
}
