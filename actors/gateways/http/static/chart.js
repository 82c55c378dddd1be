// A line over the last minute on a canvas; colours are those of the page's style.

const SECONDS = 60;

export class Chart {
  // color: a CSS variable's name; limit: a function that gives the value of a line to draw across, or null.
  constructor(canvas, color, limit = () => null) {
    this.canvas = canvas;
    this.color = color;
    this.limit = limit;
    this.points = []; // [seconds, value]
    this.top = 1;
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  add(seconds, value) {
    this.points.push([seconds, value]);
    while (this.points.length > 2 && this.points[1][0] < seconds - SECONDS) this.points.shift();
    this.draw();
  }

  draw() {
    const { canvas, points } = this;
    const scale = devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(canvas);
    const paint = (name) => style.getPropertyValue(name).trim();
    const limit = this.limit();
    this.top = roundUp(Math.max(1, limit ?? 0, ...points.map(([, value]) => value)));
    const bottom = height - 3, label = 34;
    const y = (value) => bottom - (value / this.top) * (bottom - 8);

    pen.font = `11px ${style.fontFamily}`;
    pen.textBaseline = "middle";
    pen.fillStyle = paint("--muted");
    pen.strokeStyle = paint("--line");
    pen.lineWidth = 1;
    for (const value of [0, this.top / 2, this.top]) {
      pen.beginPath();
      pen.moveTo(label, Math.round(y(value)) + 0.5);
      pen.lineTo(width, Math.round(y(value)) + 0.5);
      pen.stroke();
      if (value) pen.fillText(String(value), 0, y(value));
    }
    if (!points.length) return;
    const now = points[points.length - 1][0];
    const x = (seconds) => Math.max(label, width - ((now - seconds) / SECONDS) * (width - label));
    pen.beginPath();
    points.forEach(([seconds, value], index) => (index ? pen.lineTo(x(seconds), y(value)) : pen.moveTo(x(seconds), y(value))));
    pen.strokeStyle = paint(this.color);
    pen.lineWidth = 2;
    pen.lineJoin = "round";
    pen.stroke();
    pen.lineTo(x(now), bottom);
    pen.lineTo(x(points[0][0]), bottom);
    pen.globalAlpha = 0.14;
    pen.fillStyle = paint(this.color);
    pen.fill();
    pen.globalAlpha = 1;
  }
}

// The next of 1, 2, 4, 6, 8 or 10 times a power of ten, halves of which are short to write.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value);
}
