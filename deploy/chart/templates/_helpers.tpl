{{- define "weir.selector" -}}
app.kubernetes.io/name: weir
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "weir.metadata" -}}
name: {{ .Release.Name }}
labels:
  {{- include "weir.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .Release.Service }}
  helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* A number of YAML is a float64, which would be written as 1e+09. */ -}}
{{- define "weir.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end }}

{{- define "weir.scheme" -}}
{{ ternary "HTTPS" "HTTP" (hasKey .Values.settings "tls_certfile") }}
{{- end }}

{{- define "weir.args" -}}
{{- range .Values.models }}
- {{ . | quote }}
{{- end }}
{{- if .Values.config }}
- --config=/etc/weir/weir.toml
{{- end }}
{{- $added := dict "host" "0.0.0.0" "log_format" "json" "liveness" "models" }}
{{- /* `weir embed serve` would start a worker for each CPU of the node, and one more for bulk work. */}}
{{- if and (has "embed" .Values.command) (not .Values.config) }}{{ $_ := merge $added (dict "workers" 1 "threads" 1 "bulk_workers" 0) }}{{ end }}
{{- $own := dict "port" .Values.port "drain_timeout" .Values.drainTimeout "start_timeout" .Values.startTimeout }}
{{- if .Values.grpcPort }}{{ $_ := set $own "grpc_port" .Values.grpcPort }}{{ end }}
{{- range $name, $value := merge $own .Values.settings $added }}
{{- $flag := replace "_" "-" $name }}
{{- if kindIs "bool" $value }}
- {{ ternary "--" "--no-" $value }}{{ $flag }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%s" $flag (include "weir.text" .) | quote }}
{{- end }}
{{- else }}
- {{ printf "--%s=%s" $flag (include "weir.text" $value) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "weir.resources" -}}
{{- $workers := mul (splitList ".." (include "weir.text" (.Values.settings.workers | default 1)) | last | int) (len .Values.models | max 1) }}
{{- $fronts := .Values.settings.fronts | default 1 | int }}
{{- $cpu := ternary (add $workers $fronts) $workers (gt $fronts 1) }}
{{- $memory := printf "%dMi" (add 512 (mul 512 $workers)) }}
{{- with .Values.settings.model_memory }}{{ fail (printf "settings.model_memory=%v: state resources, which must have 512Mi more" .) }}{{ end }}
requests:
  cpu: {{ $cpu | quote }}
  memory: {{ $memory }}
limits:
  memory: {{ $memory }}
{{- end }}

{{- define "weir.probe" -}}
httpGet: {path: {{ .path }}, port: http, scheme: {{ include "weir.scheme" .root }}}
{{ toYaml .times }}
{{- end }}

{{- /* The labels by which Prometheus knows the pods of this release. */ -}}
{{- define "weir.job" -}}
job="{{ .Release.Name }}",namespace="{{ .Release.Namespace }}"
{{- end }}

{{- define "weir.prefix" -}}
{{ .Values.settings.metrics_namespace | default "weir" }}
{{- end }}

{{- define "weir.p99" -}}
histogram_quantile(0.99, sum by (le) (rate({{ include "weir.prefix" . }}_total_time_seconds_bucket{ {{- include "weir.job" . -}} }[2m])))
{{- end }}
