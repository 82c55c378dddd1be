// Markdown of a model, as elements of the page. The source becomes text nodes and a fixed set of elements, never markup:
// HTML in it is shown as text. What is no Markdown, or exceeds a bound, is shown as it is written.

const MAX_DEPTH = 6; // of lists and quotes in each other
const MAX_INLINE = 20000; // characters of one paragraph that are searched for marks
const MAX_ADDRESS = 2048; // characters of a link's address
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(\S.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( {1,4})(?=\S)/;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/;

// Shows one answer that grows. A block that has not changed keeps its element, and so a reader's selection in it.
export class Markdown {
  constructor(element) {
    this.element = element;
    this.blocks = [];
    this.next = null; // the source that the next frame shows
  }

  // Shows it with the next frame, however many pieces come until then.
  showSoon(source) {
    if (this.next === null) requestAnimationFrame(() => this.next !== null && this.show(this.next));
    this.next = source;
  }

  show(source) {
    this.next = null;
    const blocks = split(source.split("\n"));
    const same = blocks.findIndex((block, index) => block.lines.join("\n") !== this.blocks[index]?.lines.join("\n"));
    const from = same < 0 ? blocks.length : same;
    while (this.element.children.length > from) this.element.lastElementChild.remove();
    this.element.append(...blocks.slice(from).map((block) => render(block, 0)));
    this.blocks = blocks;
  }
}

// The blocks of some lines: {kind, lines}.
function split(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const kind = kindOf(lines, at);
    const end = kind === "blank" ? at + 1 : endOf(kind, lines, at);
    if (kind !== "blank") blocks.push({ kind, lines: lines.slice(at, end) });
    at = end;
  }
  return blocks;
}

function kindOf(lines, at) {
  const line = lines[at];
  if (!line.trim()) return "blank";
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "")) return "table";
  return "paragraph";
}

// Where the block ends that begins at a line.
function endOf(kind, lines, at) {
  let end = at + 1;
  if (kind === "code") {
    const [, mark] = FENCE.exec(lines[at]);
    while (end < lines.length && !closes(lines[end], mark)) end++;
    return Math.min(end + 1, lines.length);
  }
  if (kind === "list") return endOfList(lines, at);
  if (kind === "quote") while (end < lines.length && QUOTE.test(lines[end])) end++;
  if (kind === "table") while (end < lines.length && lines[end].includes("|")) end++;
  if (kind === "paragraph") while (end < lines.length && kindOf(lines, end) === "paragraph") end++;
  return end;
}

function closes(line, mark) {
  const text = line.trim();
  return text.length >= mark.length && text === mark[0].repeat(text.length);
}

function endOfList(lines, at) {
  const isItem = (line) => /\d/.test(ITEM.exec(line)?.[2] ?? "-") === /\d/.test(ITEM.exec(lines[at])[2]) && ITEM.test(line);
  const isInside = (line) => /^(?: {2}|\t)/.test(line);
  let end = at + 1;
  while (end < lines.length) {
    let next = end;
    while (next < lines.length && !lines[next].trim()) next++;
    if (next === lines.length) break;
    const goesOn = next === end && kindOf(lines, end) === "paragraph"; // a paragraph's next line need not be indented
    if (!goesOn && !isInside(lines[next]) && (!isItem(lines[next]) || RULE.test(lines[next]))) break;
    end = next + 1;
  }
  return end;
}

function render({ kind, lines }, depth) {
  if (depth > MAX_DEPTH) return element("p", document.createTextNode(lines.join("\n")));
  if (kind === "code") return code(lines);
  if (kind === "rule") return element("hr");
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]);
    return element(`h${Math.min(marks.length + 2, 6)}`, inline(text.replace(/[ \t]#+[ \t]*$/, ""))); // below the page's own
  }
  if (kind === "quote") return element("blockquote", ...nested(lines.map((line) => line.replace(QUOTE, "")), depth));
  if (kind === "list") return list(lines, depth);
  if (kind === "table") return table(lines);
  return element("p", inline(lines.join("\n")));
}

const nested = (lines, depth) => split(lines).map((block) => render(block, depth + 1));

function code(lines) {
  const [, mark, language] = FENCE.exec(lines[0]);
  const isClosed = lines.length > 1 && closes(lines.at(-1), mark);
  const text = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.className = "copy";
  const shown = element("pre", element("code", text));
  copy.addEventListener("click", async () => {
    copy.textContent = (await copied(text, shown)) ? "Copied" : "Select and copy";
    setTimeout(() => (copy.textContent = "Copy"), 2000);
  });
  const block = element("div", element("div", element("span", language || "code"), copy), shown);
  block.className = "code";
  return block;
}

// The clipboard is for pages of this machine and of https; elsewhere a selection is copied.
async function copied(text, shown) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {} // the reader has not allowed it
  }
  getSelection().selectAllChildren(shown);
  return document.execCommand("copy");
}

function list(lines, depth) {
  const [, margin, mark] = ITEM.exec(lines[0]);
  const whole = element(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark)) whole.start = parseInt(mark, 10);
  let indent = 0;
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length < margin.length + 2) {
      indent = item[0].length;
      items.push([line.slice(indent)]);
    } else {
      items.at(-1).push(line.slice(Math.min(indent, line.length - line.trimStart().length)));
    }
  }
  whole.append(...items.map((each) => element("li", ...nested(each, depth))));
  return whole;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
  const row = (line, name) => element("tr", ...cells(line).map((cell) => element(name, cell)));
  const body = lines.slice(2).map((line) => row(line, "td"));
  const whole = element("div", element("table", element("thead", row(lines[0], "th")), element("tbody", ...body)));
  whole.className = "wide-table";
  return whole;
}

// Text with its marks: `code`, **strong**, *emphasis*, ~~struck~~, [a link](address) and a bare address.
function inline(text, depth = 0) {
  const whole = document.createDocumentFragment();
  if (text.length > MAX_INLINE || depth > MAX_DEPTH) return whole.append(text), whole;
  const missing = new Set(); // marks that do not come again in this text
  let plain = "";
  let at = 0;
  while (at < text.length) {
    const found = "`*_~[!h\\".includes(text[at]) ? marked(text, at, missing, depth) : null;
    if (found?.node) {
      whole.append(plain, found.node);
      plain = "";
    } else plain += found?.text ?? text[at];
    at = found?.end ?? at + 1;
  }
  whole.append(plain);
  return whole;
}

// What begins at a place: {node, end}, or {text, end} of marks that stand for themselves; null where nothing begins.
function marked(text, at, missing, depth) {
  if (text[at] === "\\") return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? { text: text[at + 1], end: at + 2 } : null;
  if (text[at] === "`") return codeSpan(text, at, missing);
  if (text[at] === "[" || text.startsWith("![", at)) return link(text, at, missing, depth);
  if (text[at] === "h") return address(text, at);
  return emphasis(text, at, missing, depth);
}

function runOf(text, at) {
  let end = at;
  while (text[end] === text[at]) end++;
  return text.slice(at, end);
}

function find(text, mark, from, missing) {
  if (missing.has(mark)) return -1;
  const at = text.indexOf(mark, from);
  if (at < 0) missing.add(mark);
  return at;
}

function codeSpan(text, at, missing) {
  const mark = runOf(text, at);
  let end = find(text, mark, at + mark.length, missing);
  while (end >= 0 && text[end + mark.length] === "`") end = find(text, mark, end + runOf(text, end).length, missing);
  if (end < 0) return { text: mark, end: at + mark.length };
  const inside = text.slice(at + mark.length, end);
  return { node: element("code", inside.replace(/^ (?=.*\S)(.*) $/s, "$1")), end: end + mark.length };
}

const KINDS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

function emphasis(text, at, missing, depth) {
  const run = runOf(text, at);
  const mark = run.length > 1 ? run.slice(0, 2) : run;
  const start = at + mark.length;
  const asText = { text: run, end: at + run.length };
  if (!KINDS[mark] || run.length > 3 || !/\S/.test(text[start] ?? "")) return asText;
  const isWord = (character) => /[\p{L}\p{N}]/u.test(character ?? "");
  if (mark[0] === "_" && isWord(text[at - 1])) return asText;
  let end = find(text, mark, start, missing);
  for (; end >= 0; end = find(text, mark, end + 1, missing)) {
    const isSingle = mark.length === 2 || (text[end + 1] !== mark && text[end - 1] !== mark);
    const isInWord = mark[0] === "_" && isWord(text[end + mark.length]);
    if (isSingle && !isInWord && /\S/.test(text[end - 1]) && end > start) break;
  }
  if (end < 0) return missing.add(mark), asText;
  if (mark.length === 2 && text[end + 2] === mark[0]) end++; // **a *b***
  return { node: element(KINDS[mark], inline(text.slice(start, end), depth + 1)), end: end + mark.length };
}

function link(text, at, missing, depth) {
  const start = at + (text[at] === "!" ? 2 : 1); // a picture is a link to it: nothing is loaded
  const middle = find(text, "](", start, missing);
  const end = middle < 0 ? -1 : find(text, ")", middle, missing);
  if (end < 0 || end - middle > MAX_ADDRESS || text.slice(start, middle).includes("[")) return { text: text.slice(at, start), end: start };
  const node = anchor(text.slice(middle + 2, end).trim().split(/\s/)[0], inline(text.slice(start, middle), depth + 1));
  return node ? { node, end: end + 1 } : { text: text.slice(at, start), end: start };
}

function address(text, at) {
  if (at && /[\p{L}\p{N}/]/u.test(text[at - 1])) return null;
  const pattern = /https?:\/\/[^\s<>"'`]+/y;
  pattern.lastIndex = at;
  const found = pattern.exec(text)?.[0].slice(0, MAX_ADDRESS).replace(/[.,;:!?)*_~\]}]{1,8}$/, "");
  const node = found && anchor(found, found);
  return node ? { node, end: at + found.length } : null;
}

// A link that opens a page of its own, which is not told from where; null for what is no address of the web.
function anchor(target, shown) {
  if (!/^(https?:\/\/|mailto:)/i.test(target) || !URL.canParse(target)) return null;
  const node = element("a", shown);
  node.href = target;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  return node;
}

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}
