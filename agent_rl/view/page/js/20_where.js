// The language of --where over heads, as agent_rl/store/where.py has it: parsed to a tree, and asked of one head at a time.

const NUMBERS = ["reward", "turns", "calls", "errors", "tokens", "sampled", "seconds", "step", "sample", "version", "seed"];
const FLAGS = ["success", "greedy"];
const TEXTS = ["id", "group", "env", "split", "purpose", "outcome", "stop", "ending", "error", "parent", "question"];
const FIELDS = [...NUMBERS, ...FLAGS, ...TEXTS];
const VALUES = {
  purpose: ["train", "eval", "rollout", "demonstration"],
  outcome: ["terminated", "truncated", "failed"],
  stop: ["done", "env_truncated", "turns", "tokens", "tool_calls", "seconds", "length", "error"],
  ending: ["ok", "truncated", "parse_error", "sandbox_ended", "env_crash", "tool_infra", "sandbox_lost", "policy_error", "judge_failed", "timeout", "cancelled"],
  success: ["yes", "no", "none"],
  greedy: ["yes", "no"],
};
const BOOLEANS = { yes: true, true: true, no: false, false: false };
const TOKEN = /\s*(?:(?<sign><=|>=|!=|==?|<|>)|(?<mark>[(),])|(?<quoted>"(?:[^"\\]|\\[^])*"|'(?:[^'\\]|\\[^])*')|(?<word>[^\s()<>=!,"']+)|(?<end>$)|(?<odd>[^]))/gy;
const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$/;
const ORDERS = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b };
const MOST = 500, DEEPEST = 100;

/** An expression that has no meaning; `place` says where, `reason` why. */
class WhereError extends Error {}

/** Return {node, clauses}: the tree of an expression, and the texts that `and` joins at its top. */
function parseWhere(text) {
  const parser = new WhereParser(text);
  return { node: parser.parse(), clauses: parser.clauses };
}

/** Return a function of `read`, which gives a field's value: whether the expression holds. */
function whereTest(node) {
  if (node.every) {
    const parts = node.every.map(whereTest);
    return (read) => parts.every((part) => part(read));
  }
  if (node.either) {
    const parts = node.either.map(whereTest);
    return (read) => parts.some((part) => part(read));
  }
  if (node.not) {
    const part = whereTest(node.not);
    return (read) => !part(read);
  }
  return comparisonTest(node);
}

function comparisonTest({ field, sign, values }) {
  if (sign !== "=") {
    const wanted = Number(values[0]), order = ORDERS[sign];
    return (read) => {
      const value = read(field);
      return typeof value === "number" && order(value, wanted);
    };
  }
  const texts = values.filter((value) => value !== null);
  const patterns = texts.filter((text) => text.includes("*")).map(globOf), plain = new Set(texts);
  const numbers = new Set(texts.filter((text) => NUMBER.test(text)).map(Number));
  const booleans = new Set(texts.filter((text) => Object.hasOwn(BOOLEANS, text)).map((text) => BOOLEANS[text]));
  const hasNone = values.includes(null);
  return (read) => {
    const value = read(field);
    if (value === null || value === undefined) return hasNone;
    if (typeof value === "number") return numbers.has(value);
    if (typeof value === "boolean") return booleans.has(value);
    return plain.has(value) || patterns.some((pattern) => pattern.test(value));
  };
}

/** Return a pattern in which only `*` is special. */
function globOf(text) {
  const parts = text.split("*").map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return new RegExp(`^${parts.join("[^]*")}$`, "u");
}

class WhereParser {
  constructor(text) {
    Object.assign(this, { text, at: 0, comparisons: 0, tokens: [], clauses: [] });
    for (const found of text.matchAll(TOKEN)) {
      const [kind, said] = Object.entries(found.groups).find(([, value]) => value !== undefined);
      const token = { kind, text: said, stop: found.index + found[0].length };
      token.start = token.stop - said.length;
      if (kind === "odd") {
        const what = "\"'".includes(said) ? "a quote is not closed" : `${said} has no meaning`;
        this.fail(token, `${what}; a value with such characters goes in quotes`);
      }
      this.tokens.push(token);
      if (kind === "end") break;
    }
  }

  parse() {
    const node = this.expression(0);
    if (this.next.kind !== "end") this.fail(this.next, `here goes and, or, or nothing more.${didYouMean(this.next.text, ["and", "or"]) || " A value with spaces goes in quotes."}`);
    return node;
  }

  get next() {
    return this.tokens[this.at];
  }

  /** Step over the next token if it is one of these, unquoted. */
  take(...texts) {
    const found = this.next.kind !== "quoted" && texts.includes(this.next.text);
    if (found) this.at++;
    return found;
  }

  fail(token, reason) {
    throw new WhereError(`${token.text ? `'${token.text}' at character ${token.start + 1}` : "the end"}: ${reason}`);
  }

  expression(depth) {
    const start = this.next.start, ends = [];
    const node = this.chain("or", "either", () => this.chain("and", "every", () => {
      const from = this.next.start, part = this.term(depth);
      ends.push(this.text.slice(from, this.tokens[this.at - 1].stop));
      return part;
    }));
    if (depth === 0) this.clauses = node.either && ends.length > 1 ? [`(${this.text.slice(start).trim()})`] : ends;
    return node;
  }

  chain(word, name, part) {
    const parts = [part()];
    while (this.take(word)) parts.push(part());
    return parts.length > 1 ? { [name]: parts } : parts[0];
  }

  term(depth) {
    if (depth > DEEPEST || this.comparisons >= MOST) {
      this.fail(this.next, `more than ${MOST} conditions, or ${DEEPEST} in each other; in (a, b) is one`);
    }
    if (this.take("not")) return { not: this.term(depth + 1) };
    if (!this.take("(")) return this.condition();
    const inner = this.expression(depth + 1);
    this.expect(")");
    return inner;
  }

  condition() {
    const first = this.next;
    if (first.kind !== "word") this.fail(first, "here goes a condition, such as reward<0.5 or stop=turns");
    this.at++;
    let name = first.text;
    if (["task.", "rewards."].includes(name) && this.next.kind === "quoted" && this.next.start === first.stop) {
      name += unquoted(this.next.text);
      this.at++;
    }
    this.comparisons++;
    const sign = this.next;
    const isList = sign.kind === "word" && ["in", "not"].includes(sign.text);
    if (!isList && sign.kind !== "sign") this.fail(first, "is no condition: write FIELD<VALUE, such as reward<0.5");
    this.checkField(name, first);
    this.at++;
    if (isList) return this.members(name, sign.text === "not");
    const value = this.value(name, sign.text);
    const found = { field: name, sign: ["==", "!="].includes(sign.text) ? "=" : sign.text, values: [value] };
    return sign.text === "!=" ? { not: found } : found;
  }

  members(name, isNot) {
    if (isNot) this.expect("in");
    this.expect("(");
    const values = [this.value(name, "=")];
    while (this.take(",")) values.push(this.value(name, "="));
    this.expect(")");
    const found = { field: name, sign: "=", values };
    return isNot ? { not: found } : found;
  }

  checkField(name, token) {
    const [, outer, inner] = name.match(/^([^.]*)\.?([^]*)$/), form = { task: "task.KEY", rewards: "rewards.NAME" };
    if (FIELDS.includes(name) || (Object.hasOwn(form, outer) && inner && !/["\\]/.test(inner))) return;
    if (name.includes(".") && Object.hasOwn(form, outer)) {
      this.fail(token, `write ${form[outer]}, or ${outer}."KEY"; a key may hold no quotes`);
    }
    this.fail(token, `no such field.${didYouMean(name, FIELDS)} There are: ${[...FIELDS, ...Object.values(form)].join(", ")}.`);
  }

  expect(text) {
    if (!this.take(text)) this.fail(this.next, `here goes ${text}`);
  }

  /** Return a value, checked for its field. */
  value(name, sign) {
    const token = this.next;
    if (!["word", "quoted"].includes(token.kind)) this.fail(token, `a value for ${name} is missing; an empty text is ""`);
    this.at++;
    const value = token.kind === "quoted" ? unquoted(token.text) : token.text;
    const isOrder = Object.hasOwn(ORDERS, sign), isNone = value === "none" && token.kind === "word";
    if (isOrder && (isNone || FLAGS.includes(name) || TEXTS.includes(name))) {
      this.fail(token, `${name} ${sign} ${value} has no meaning; = and != have${TEXTS.includes(name) ? ", and * in the value" : ""}`);
    }
    if (isNone && name !== "greedy") return null;
    if ((NUMBERS.includes(name) || name.startsWith("rewards.") || isOrder) && !NUMBER.test(value)) {
      this.fail(token, `${name} is a number, or none`);
    }
    if (FLAGS.includes(name) && Object.hasOwn(BOOLEANS, value)) return value;
    const known = VALUES[name] ?? [];
    if (known.length && !known.includes(value) && (!value.includes("*") || FLAGS.includes(name))) {
      this.fail(token, `${name} is one of ${known.join(", ")}.${didYouMean(value, known)}`);
    }
    return value;
  }
}

/** Return a sentence with the name that was meant, or nothing. */
function didYouMean(name, known) {
  const near = known.map((one) => [distance(name, one), one]).sort(([one], [other]) => one - other)[0];
  return near && near[0] <= Math.max(1, name.length / 3) ? ` Did you mean '${near[1]}'?` : "";
}

/** Return how many letters are added, left out or changed between two words; a swap of neighbours counts once. */
function distance(one, other) {
  const rows = [...Array(one.length + 1)].map((_, i) => [i, ...Array(other.length).fill(0)]);
  for (let j = 1; j <= other.length; j++) rows[0][j] = j;
  for (let i = 1; i <= one.length; i++) {
    for (let j = 1; j <= other.length; j++) {
      const isSame = one[i - 1] === other[j - 1];
      rows[i][j] = Math.min(rows[i - 1][j] + 1, rows[i][j - 1] + 1, rows[i - 1][j - 1] + (isSame ? 0 : 1));
      const isSwap = i > 1 && j > 1 && one[i - 1] === other[j - 2] && one[i - 2] === other[j - 1];
      if (isSwap) rows[i][j] = Math.min(rows[i][j], rows[i - 2][j - 2] + 1);
    }
  }
  return rows[one.length][other.length];
}

function unquoted(text) {
  return text.slice(1, -1).replace(/\\([^])/g, "$1");
}
