// A client of msgpack-RPC in plain Node, written from proto/README.md: node client.mjs unix-socket-or-port prompt
import net from "node:net";

const pack = (value) => {
  if (value === null) return Buffer.from([0xc0]);
  if (Number.isInteger(value)) return Buffer.from([0xd2, value >> 24, value >> 16, value >> 8, value]);
  if (typeof value === "string") {
    const text = Buffer.from(value);
    return Buffer.concat([Buffer.from([0xda, text.length >> 8, text.length]), text]);
  }
  const items = Array.isArray(value) ? value : Object.entries(value).flat();
  const head = Array.isArray(value) ? 0x90 | items.length : 0x80 | (items.length / 2);
  return Buffer.concat([Buffer.from([head]), ...items.map(pack)]);
};

class Reader {
  constructor(bytes) { this.bytes = bytes; this.at = 0; }
  take(count) {
    if (this.at + count > this.bytes.length) throw new RangeError("more bytes are to come");
    return this.bytes.subarray(this.at, (this.at += count));
  }
  uint(count) { return Number("0x" + this.take(count).toString("hex")); }
  list(count) { return Array.from({ length: count }, () => this.next()); }
  map(count) { return Object.fromEntries(Array.from({ length: count }, () => [this.next(), this.next()])); }
  next() {
    const kind = this.uint(1);
    if (kind < 0x80) return kind;
    if (kind < 0x90) return this.map(kind & 15);
    if (kind < 0xa0) return this.list(kind & 15);
    if (kind < 0xc0) return this.take(kind & 31).toString();
    if (kind >= 0xe0) return kind - 256;
    const read = {
      0xc0: () => null, 0xc2: () => false, 0xc3: () => true, 0xcb: () => this.take(8).readDoubleBE(),
      0xcc: () => this.uint(1), 0xcd: () => this.uint(2), 0xce: () => this.uint(4), 0xcf: () => this.uint(8),
      0xd9: () => this.take(this.uint(1)).toString(), 0xda: () => this.take(this.uint(2)).toString(),
      0xdc: () => this.list(this.uint(2)), 0xde: () => this.map(this.uint(2)),
    }[kind];
    return read();
  }
}

const [where, prompt] = process.argv.slice(2);
const isPort = /^\d+$/.test(where);
const socket = net.connect(isPort ? Number(where) : where);
if (isPort) socket.write(pack([0, 0, "hello", [{}]])); // over TCP it comes first
socket.write(pack([0, 1, "stream", [{ prompt, max_tokens: 8 }]]));
let held = Buffer.alloc(0);
socket.on("data", (data) => {
  held = Buffer.concat([held, data]);
  for (const reader = new Reader(held); ; held = held.subarray(reader.at), reader.bytes = held, reader.at = 0) {
    let message;
    try { message = reader.next(); } catch (error) { if (error instanceof RangeError) return; throw error; }
    const [kind, id, error, result] = message;
    if (kind === 2 && id === "token") console.log("token", ...error.slice(1));
    if (kind === 1 && id !== 0) { console.log(JSON.stringify(error ?? result)); socket.end(); }
  }
});
